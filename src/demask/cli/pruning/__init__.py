"""`demask prune`: train, prune, tune and demask an image classifier."""
