"""The commands of `mesa-tune`, one module each: parse options, call the library, write text and files."""
