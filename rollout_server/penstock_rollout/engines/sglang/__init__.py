"""The SGLang engine, whose server runs in a child process."""
