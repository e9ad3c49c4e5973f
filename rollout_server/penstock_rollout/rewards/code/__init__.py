"""The code reward runs a response's program against the tests of its ground truth."""
