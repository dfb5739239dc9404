"""Operations on arrays: one folder each, with a reference that is always there."""
