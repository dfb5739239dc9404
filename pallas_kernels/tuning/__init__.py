"""What is chosen for each kind of device: a table of speeds, never of results."""
