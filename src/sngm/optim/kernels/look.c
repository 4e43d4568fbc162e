/* Where tensors lie, and how: asked of all of them in one call. look.py says what for, and compiles this. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>

static PyTypeObject *tensor_type;
static DLPackDLTensorFromPyObjectNoSync view_of;

/* Sees one tensor, by code of its subclass where that has some. */
static int see(PyObject *object, DLTensor *tensor) {
    if (view_of(object, tensor)) {
        PyErr_Clear(); /* of sparse tensors, say */
    } else {
        int empty = 0;
        for (int32_t i = 0; i < tensor->ndim; i++)
            empty |= tensor->shape[i] == 0;
        if (tensor->data || empty)
            return 0;
    }
    PyErr_SetString(PyExc_BufferError, "a tensor has no memory of its own to look at");
    return -1;
}

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

/* Makes room for so many numbers more. */
static int grow(int64_t **forms, Py_ssize_t *room, Py_ssize_t used, Py_ssize_t more) {
    if (used + more <= *room)
        return 0;
    int64_t *larger = PyMem_Realloc(*forms, (2 * *room + more) * sizeof **forms);
    if (!larger) {
        PyErr_NoMemory();
        return -1;
    }
    *forms = larger;
    *room = 2 * *room + more;
    return 0;
}

/* look(tensors) -> (addresses, forms, bits) */
static PyObject *look(PyObject *module, PyObject *tensors) {
    PyObject *objects = PySequence_Tuple(tensors); /* which nobody else can change meanwhile */
    if (!objects)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(objects), room = 16 * count + 64, used = 0;
    int64_t bits = 0, *forms = PyMem_Malloc(room * sizeof *forms);
    PyObject *addresses = PyBytes_FromStringAndSize(NULL, count * sizeof(int64_t)), *result = NULL;
    if (!forms || !addresses) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *address = (int64_t *)PyBytes_AS_STRING(addresses);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyTuple_GET_ITEM(objects, i);
        DLTensor tensor = {.ndim = 0};
        int is_tensor = PyObject_TypeCheck(object, tensor_type);
        if ((is_tensor && see(object, &tensor)) || grow(&forms, &room, used, 3 + 2 * tensor.ndim))
            goto done;
        if (is_tensor) {
            used += write_form(&tensor, forms + used);
        } else {
            forms[used++] = -1;
        }
        address[i] = (int64_t)((char *)tensor.data + tensor.byte_offset);
        bits |= address[i];
    }
    result = Py_BuildValue("Oy#L", addresses, (char *)forms, used * (Py_ssize_t)sizeof *forms, (long long)bits);
done:
    PyMem_Free(forms);
    Py_XDECREF(addresses);
    Py_DECREF(objects);
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
    Py_XDECREF(capsule); /* what it points to stays for as long as the process */
    if (api && api->header.version.major == DLPACK_MAJOR_VERSION && api->dltensor_from_py_object_no_sync) {
        tensor_type = (PyTypeObject *)type; /* and is kept */
        view_of = api->dltensor_from_py_object_no_sync;
        return PyModule_Create(&module);
    }
    Py_XDECREF(type);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ImportError, "torch gives no views of this version of DLPack");
    return NULL;
}
