"""SGLang, in a process of its own."""
