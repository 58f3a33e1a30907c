"""Parts of the round loop, each with the same few hooks: privacy, secure sums, virtual time, asynchronous rounds."""
