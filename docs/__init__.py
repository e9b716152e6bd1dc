"""The pages of the site, and what generates some of them: `python -m docs`."""
