"""Reading a Hugging Face folder into a model that was made without memory: each rank reads only its own part."""
