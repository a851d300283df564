// The thread pool of the native kernels, compiled for this extension too: extensions compile at the same time and
// must not write one object file.
#include "../backends/native/src/pool.cpp"
