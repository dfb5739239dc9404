"""Training of the small byte-level model: data, step, run, evaluation."""
