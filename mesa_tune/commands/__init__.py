"""The commands of `mesa-tune`, a module each: options in, the library called, text and files out."""
