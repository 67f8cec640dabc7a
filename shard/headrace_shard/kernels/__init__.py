"""Native kernels for the CPU: C++ built at first use with the machine's own instruction set."""
