"""The public path of the timeline, which lives in `fairshard.extras.observe`."""
