"""What tests share, whatever room they test."""
