"""What the story stands on: none of it is needed to understand GPT-2."""
