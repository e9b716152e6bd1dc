"""What a drawn network is made of, step by step."""
