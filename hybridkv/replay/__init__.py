"""What a prefix cache would have done with a trace: real bookkeeping, modelled seconds."""
