"""Which prefixes are stored: who they belong to, how they are found, what was ever computed."""
