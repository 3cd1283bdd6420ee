"""What we ask of the operating system: files, output, signals, limits, processes, cores."""
