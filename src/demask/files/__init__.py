"""Reading and writing files: everything that comes from outside is hostile until parsed."""
