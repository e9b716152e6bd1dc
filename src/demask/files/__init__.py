"""Reading and writing of files: all input is untrusted until it is checked."""
