/* Where tensors lie, and how: asked of all of them in one call from Python. Compiled where it is used, see look.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>

#include <string.h>

static PyTypeObject *tensor_type;
static DLPackDLTensorFromPyObjectNoSync view_of;

/* Writes how one tensor lies: device, dtype, dimensions, sizes, strides. Returns how many numbers that takes. */
static Py_ssize_t write_form(const DLTensor *tensor, int64_t *form) {
    int64_t *sizes = form + 3, *strides = sizes + tensor->ndim;
    form[0] = ((int64_t)tensor->device.device_type << 32) | (uint32_t)tensor->device.device_id;
    form[1] = ((int64_t)tensor->dtype.code << 32) | ((int64_t)tensor->dtype.bits << 16) | tensor->dtype.lanes;
    form[2] = tensor->ndim;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        sizes[i] = tensor->shape[i];
        strides[i] = tensor->shape[i] == 1 ? 0 : tensor->strides[i]; /* of one element it says nothing */
    }
    return 3 + 2 * (Py_ssize_t)tensor->ndim;
}

/* look(tensors) -> (addresses, forms, bits); `tensors` is a list or tuple, with None where there is no tensor. */
static PyObject *look(PyObject *module, PyObject *tensors) {
    if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "look() takes a list or a tuple");
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors), room = 16 * count + 64, used = 0;
    int64_t bits = 0, *forms = PyMem_Malloc(room * sizeof *forms);
    PyObject *addresses = PyBytes_FromStringAndSize(NULL, count * sizeof(int64_t)), *result = NULL;
    if (!forms || !addresses) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *address = (int64_t *)PyBytes_AS_STRING(addresses);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PySequence_Fast_GET_ITEM(tensors, i);
        DLTensor tensor = {.ndim = 0};
        if (object == Py_None) {
            address[i] = 0;
        } else if (!PyObject_TypeCheck(object, tensor_type)) {
            PyErr_Format(PyExc_TypeError, "look() takes tensors, got %s", Py_TYPE(object)->tp_name);
            goto done;
        } else if (view_of(object, &tensor)) {
            goto done;
        } else {
            address[i] = (int64_t)((char *)tensor.data + tensor.byte_offset);
        }
        if (used + 3 + 2 * tensor.ndim > room) {
            room = 2 * room + 3 + 2 * tensor.ndim;
            int64_t *more = PyMem_Realloc(forms, room * sizeof *forms);
            if (!more) {
                PyErr_NoMemory();
                goto done;
            }
            forms = more;
        }
        if (object == Py_None) {
            forms[used++] = -1;
        } else {
            used += write_form(&tensor, forms + used);
        }
        bits |= address[i];
    }
    result = Py_BuildValue("Oy#L", addresses, (char *)forms, used * (Py_ssize_t)sizeof *forms, (long long)bits);
done:
    PyMem_Free(forms);
    Py_XDECREF(addresses);
    return result;
}

static PyMethodDef methods[] = {{"look", look, METH_O, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "sngm_look", NULL, -1, methods};

PyMODINIT_FUNC PyInit_sngm_look(void) {
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *type = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    PyObject *capsule = type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : NULL;
    const DLPackExchangeAPI *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(torch);
    Py_XDECREF(capsule); /* its pointer stays good, and the type is kept */
    if (!api)
        return NULL;
    if (api->header.version.major != DLPACK_MAJOR_VERSION || !api->dltensor_from_py_object_no_sync) {
        PyErr_SetString(PyExc_ImportError, "torch gives no views of this version of DLPack");
        return NULL;
    }
    tensor_type = (PyTypeObject *)type;
    view_of = api->dltensor_from_py_object_no_sync;
    return PyModule_Create(&module);
}
