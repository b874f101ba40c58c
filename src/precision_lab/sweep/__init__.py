"""A sweep: many jobs, each in a fresh process, none touching another. No torch in the process that leads it."""
