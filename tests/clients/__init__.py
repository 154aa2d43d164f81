"""Programs that use other people's trainers, each on fairshard and on torch's engine; `make clients` runs them all."""
