"""What offloading executors share: the packed file, direct reads, the stream from it, rates that are kept."""
