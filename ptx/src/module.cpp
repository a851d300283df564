// The Python module, which is empty: machine.py calls the functions of launch.cpp by ctypes.
#include <Python.h>

PyMODINIT_FUNC PyInit__machine() {
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_machine", "The PTX machine.", -1, nullptr, nullptr,
                                     nullptr, nullptr, nullptr};
    return PyModule_Create(&definition);
}
