"""Where a subject runs: a name, a device, a clock and a memory meter. One file each."""
