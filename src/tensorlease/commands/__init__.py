"""Commands that need broker and agents both, or neither."""
