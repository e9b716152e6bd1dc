"""A search for the amount of each group, resumable and on several workers."""
