/* What every message pays, compiled. Each name here has its Python counterpart, which is what people read: see
   accelerator.py. Nothing here raises an error of ours: where a record is damaged or unusual, the Python code is asked,
   which then says so.

   Every length was sent by somebody else: none is believed before it was compared with the bytes that are there. */

#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000 /* one build for 3.11 and all that come after it; free-threaded ones have no such thing */
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

enum { REVISION = 1 }; /* of what is agreed with the Python code, see accelerator.py */

#ifdef Py_GIL_DISABLED
#define BEGIN_ALONE(object) Py_BEGIN_CRITICAL_SECTION(object)
#define END_ALONE() Py_END_CRITICAL_SECTION()
#else /* the GIL is held from the first look at a record to what is kept of it */
#define BEGIN_ALONE(object) {
#define END_ALONE() }
#endif

enum { /* SysFlag */
    COMPRESSED = 0x1,
    BORN_HOST_V6 = 0x10,
    STORE_HOST_V6 = 0x20,
    UNPACK = 0x40 | 0x80, /* NEED_UNWRAP | INNER_BATCH */
    UNUSUAL = BORN_HOST_V6 | STORE_HOST_V6 | COMPRESSED | UNPACK,
};

#define MAGIC_V1 0xDAA320A7u /* topic length in one byte */
enum { MAGIC = 4, QUEUE_OFFSET = 20, SYS_FLAG = 36, BODY_LENGTH = 84, BODY = 88, SHORTEST_RECORD = 91 }; /* IPv4 hosts */

static inline uint32_t u32_at(const unsigned char *place)
{
    return (uint32_t)place[0] << 24 | (uint32_t)place[1] << 16 | (uint32_t)place[2] << 8 | place[3];
}

static inline int64_t i64_at(const unsigned char *place)
{
    return (int64_t)((uint64_t)u32_at(place) << 32 | u32_at(place + 4));
}

/* --- names of properties: the same few in all messages, so their strings are kept */

enum { KEPT_NAMES = 128, LONGEST_KEPT = 47 };

typedef struct {
    PyObject *text; /* NULL: nothing here yet */
    unsigned char length;
    char bytes[LONGEST_KEPT];
} KeptName;

typedef struct {
    PyTypeObject *record_type;
    PyObject *unpacked, *properties_start, *get; /* names of methods */
    KeptName names[KEPT_NAMES];
} State;

static PyObject *name_of(State *state, const char *bytes, Py_ssize_t length)
{
#ifndef Py_GIL_DISABLED
    if (length <= LONGEST_KEPT) {
        uint32_t hash = 2166136261u;
        for (Py_ssize_t each = 0; each < length; each++) {
            hash = (hash ^ (unsigned char)bytes[each]) * 16777619u;
        }
        KeptName *kept = &state->names[(hash ^ hash >> 15) % KEPT_NAMES];
        if (kept->text != NULL && kept->length == length && memcmp(kept->bytes, bytes, (size_t)length) == 0) {
            return Py_NewRef(kept->text);
        }
        PyObject *text = PyUnicode_DecodeUTF8(bytes, length, "replace");
        if (text == NULL) {
            return NULL;
        }
        PyUnicode_InternInPlace(&text);
        PyObject *before = kept->text;
        kept->text = Py_NewRef(text);
        kept->length = (unsigned char)length;
        memcpy(kept->bytes, bytes, (size_t)length);
        Py_XDECREF(before);
        return text;
    }
#endif
    return PyUnicode_DecodeUTF8(bytes, length, "replace");
}

/* --- properties: `name 01 value 02 name 01 value 02 ...`. See properties.py */

typedef struct {
    const char *name, *value;
    Py_ssize_t name_length, value_length;
} Item;

/* Find the next item that has a name and a value from `*place` on; return whether there is one. */
static inline int next_item(const char **place, const char *end, Item *item)
{
    while (*place < end) {
        const char *start = *place;
        const char *stop = memchr(start, 2, (size_t)(end - start));
        if (stop == NULL) {
            stop = end; /* brokers may leave the last one out */
        }
        *place = stop + (stop < end);
        const char *name_end = memchr(start, 1, (size_t)(stop - start));
        if (name_end != NULL && name_end > start && name_end + 1 < stop) {
            *item = (Item){start, name_end + 1, name_end - start, stop - name_end - 1};
            return 1;
        }
    }
    return 0;
}

static PyObject *properties_in(State *state, const char *text, const char *end)
{
    PyObject *properties = PyDict_New();
    Item item;
    while (properties != NULL && next_item(&text, end, &item)) {
        PyObject *name = name_of(state, item.name, item.name_length);
        PyObject *value = name ? PyUnicode_DecodeUTF8(item.value, item.value_length, "replace") : NULL;
        if (value == NULL || PyDict_SetItem(properties, name, value) < 0) {
            Py_CLEAR(properties);
        }
        Py_XDECREF(name);
        Py_XDECREF(value);
    }
    return properties;
}

/* --- Record: see record.py */

typedef struct {
    PyObject_HEAD
    long long queue_offset;
    long long extra_attempts;
    Py_ssize_t start, body_end, end;
    int sys_flag;
    PyObject *data, *queue, *fixed, *body, *properties, *done, *key_line;
} Record;

static void record_dealloc(PyObject *self);

/* Return the state of this module for a Record, or for what is derived from it. */
static State *state_of(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    while (PyType_GetSlot(type, Py_tp_dealloc) != (void *)record_dealloc) {
        type = PyType_GetSlot(type, Py_tp_base);
    }
    return PyType_GetModuleState(type);
}

static int record_traverse(PyObject *self, visitproc visit, void *arg)
{
    Record *record = (Record *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(record->data);
    Py_VISIT(record->queue);
    Py_VISIT(record->fixed);
    Py_VISIT(record->body);
    Py_VISIT(record->properties);
    Py_VISIT(record->done);
    Py_VISIT(record->key_line);
    return 0;
}

static int record_clear(PyObject *self)
{
    Record *record = (Record *)self;
    Py_CLEAR(record->data);
    Py_CLEAR(record->queue);
    Py_CLEAR(record->fixed);
    Py_CLEAR(record->body);
    Py_CLEAR(record->properties);
    Py_CLEAR(record->done);
    Py_CLEAR(record->key_line);
    return 0;
}

static void record_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    record_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Make a record of `type`; where it lies in `data` was looked at. */
static Record *new_record(
    PyTypeObject *type, PyObject *data, Py_ssize_t start, Py_ssize_t body_end, Py_ssize_t end, long long queue_offset,
    int sys_flag, PyObject *queue, PyObject *fixed)
{
    Record *record = (Record *)PyType_GenericAlloc(type, 0);
    if (record != NULL) {
        record->queue_offset = queue_offset;
        record->start = start;
        record->body_end = body_end;
        record->end = end;
        record->sys_flag = sys_flag;
        record->data = Py_NewRef(data);
        record->queue = Py_NewRef(queue);
        record->fixed = Py_NewRef(fixed);
        record->body = Py_NewRef(Py_None);
        record->properties = Py_NewRef(Py_None);
        record->done = Py_NewRef(Py_False);
    }
    return record;
}

/* Return the bytes a record lies in, once it is certain that it does. */
static const unsigned char *bytes_of(Record *record)
{
    if (record->data == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a message without a record: decode_messages makes messages");
        return NULL;
    }
    return (const unsigned char *)PyBytes_AsString(record->data);
}

/* Find the properties: after topic and length, and up to the record's end. */
static const char *properties_of(Record *record)
{
    const unsigned char *data = bytes_of(record);
    if (data == NULL) {
        return NULL;
    }
    Py_ssize_t topic = record->body_end, start;
    if (data[record->start + MAGIC + 3] == (MAGIC_V1 & 0xFF)) {
        start = topic + data[topic] + 3;
    } else {
        start = topic + (data[topic] << 8 | data[topic + 1]) + 4;
    }
    if (start > record->end || start + (data[start - 2] << 8 | data[start - 1]) != record->end) {
        PyObject *raised = PyObject_CallMethodObjArgs(
            (PyObject *)record, state_of((PyObject *)record)->properties_start, NULL); /* says what is wrong */
        if (raised != NULL) {
            Py_DECREF(raised);
            PyErr_SetString(PyExc_SystemError, "a damaged record that is none");
        }
        return NULL;
    }
    return (const char *)data + start;
}

static PyObject *record_body(PyObject *self, void *closure)
{
    Record *record = (Record *)self;
    PyObject *body = NULL;
    BEGIN_ALONE(self)
    if (record->body != NULL && record->body != Py_None) {
        body = Py_NewRef(record->body);
    } else {
        const unsigned char *data = bytes_of(record);
        int flag = record->sys_flag;
        if (data != NULL) {
            Py_ssize_t start = record->start + BODY;
            start += (flag & BORN_HOST_V6 ? 12 : 0) + (flag & STORE_HOST_V6 ? 12 : 0);
            Py_ssize_t length = record->body_end - start;
            body = PyBytes_FromStringAndSize((const char *)data + start, length > 0 ? length : 0);
            if (body != NULL && flag & (COMPRESSED | UNPACK)) {
                PyObject *stored = body;
                body = PyObject_CallMethodObjArgs(self, state_of(self)->unpacked, stored, NULL);
                Py_DECREF(stored);
            }
        }
        if (body != NULL) {
            PyObject *before = record->body;
            record->body = Py_NewRef(body);
            Py_XDECREF(before);
        }
    }
    END_ALONE()
    return body;
}

/* Return the properties, which are kept: a new reference. */
static PyObject *kept_properties(Record *record)
{
    if (record->properties == NULL || record->properties == Py_None) {
        const char *text = properties_of(record);
        if (text == NULL) {
            return NULL;
        }
        const char *end = PyBytes_AsString(record->data) + record->end;
        PyObject *properties = properties_in(state_of((PyObject *)record), text, end);
        if (properties == NULL) {
            return NULL;
        }
        PyObject *before = record->properties;
        record->properties = properties;
        Py_XDECREF(before);
    }
    return Py_NewRef(record->properties);
}

static PyObject *record_properties(PyObject *self, void *closure)
{
    PyObject *properties;
    BEGIN_ALONE(self)
    properties = kept_properties((Record *)self);
    END_ALONE()
    return properties;
}

/* Return `dictionary.get(name)`. */
static PyObject *got(State *state, PyObject *dictionary, PyObject *name)
{
    return PyObject_CallMethodObjArgs(dictionary, state->get, name, NULL);
}

/* Return the property `name` in a text: the last item of that name that has a value. */
static PyObject *property_in(State *state, const char *text, const char *end, PyObject *name)
{
    if (!PyUnicode_Check(name)) {
        return PyErr_Format(PyExc_TypeError, "a property's name is a str, not %R", (PyObject *)Py_TYPE(name));
    }
    Py_ssize_t length;
    const char *wanted = PyUnicode_AsUTF8AndSize(name, &length);
    if (wanted == NULL) { /* half of a surrogate pair: no text has that */
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            return NULL;
        }
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    for (Py_ssize_t place = 0; place + 2 < length; place++) { /* U+FFFD may stand for any bytes that are no UTF-8 */
        if (memcmp(wanted + place, "\xef\xbf\xbd", 3) == 0) {
            PyObject *properties = properties_in(state, text, end);
            PyObject *value = properties ? got(state, properties, name) : NULL;
            Py_XDECREF(properties);
            return value;
        }
    }
    Item item, found = {0};
    while (next_item(&text, end, &item)) {
        if (item.name_length == length && memcmp(item.name, wanted, (size_t)length) == 0) {
            found = item;
        }
    }
    if (found.value == NULL) {
        return Py_NewRef(Py_None);
    }
    return PyUnicode_DecodeUTF8(found.value, found.value_length, "replace");
}

static PyObject *record_property(PyObject *self, PyObject *name)
{
    Record *record = (Record *)self;
    PyObject *value = NULL;
    BEGIN_ALONE(self)
    if (record->properties != NULL && record->properties != Py_None) {
        value = got(state_of(self), record->properties, name);
    } else {
        const char *text = properties_of(record);
        if (text != NULL) {
            value = property_in(state_of(self), text, PyBytes_AsString(record->data) + record->end, name);
        }
    }
    END_ALONE()
    return value;
}

static PyMemberDef record_members[] = {
    {"queue_offset", T_LONGLONG, offsetof(Record, queue_offset), 0, "Its place in its queue."},
    {"sys_flag", T_INT, offsetof(Record, sys_flag), READONLY, "See SysFlag."},
    {"_data", T_OBJECT_EX, offsetof(Record, data), READONLY, NULL},
    {"_start", T_PYSSIZET, offsetof(Record, start), READONLY, NULL},
    {"_body_end", T_PYSSIZET, offsetof(Record, body_end), READONLY, NULL},
    {"_end", T_PYSSIZET, offsetof(Record, end), READONLY, NULL},
    {"_queue", T_OBJECT_EX, offsetof(Record, queue), 0, NULL},
    {"_fixed", T_OBJECT_EX, offsetof(Record, fixed), 0, NULL},
    {"_body", T_OBJECT_EX, offsetof(Record, body), 0, NULL},
    {"_properties", T_OBJECT_EX, offsetof(Record, properties), READONLY, NULL},
    {"_done", T_OBJECT_EX, offsetof(Record, done), 0, NULL},
    {"_extra_attempts", T_LONGLONG, offsetof(Record, extra_attempts), 0, NULL},
    {"_key_line", T_OBJECT_EX, offsetof(Record, key_line), 0, NULL},
    {NULL},
};

static PyGetSetDef record_getset[] = {
    {"body", record_body, NULL, "What was sent, decompressed; b\"\" when nothing was.", NULL},
    {"properties", record_properties, NULL, "Every property, the reserved ones too (see PropertyName).", NULL},
    {NULL},
};

static PyMethodDef record_methods[] = {
    {"property", record_property, METH_O, "Return the property `name`, None when it is absent."},
    {NULL},
};

static PyType_Slot record_slots[] = {
    {Py_tp_doc, "A stored record, read where it lies. See pyrocket_consumer.wire.record."},
    {Py_tp_members, record_members},
    {Py_tp_getset, record_getset},
    {Py_tp_methods, record_methods},
    {Py_tp_traverse, record_traverse},
    {Py_tp_clear, record_clear},
    {Py_tp_dealloc, record_dealloc},
    {0, NULL},
};

static PyType_Spec record_spec = {
    .name = "pyrocket_consumer.wire._accelerator.Record",
    .basicsize = sizeof(Record),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = record_slots,
};

/* --- functions: see record.py */

/* Tell whether `kind` is derived from Record, and adds nothing to what its objects hold. */
static int is_kind(PyObject *module, PyObject *kind)
{
    State *state = PyModule_GetState(module);
    if (!PyType_Check(kind) || !PyType_IsSubtype((PyTypeObject *)kind, state->record_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no kind of Record", kind);
        return 0;
    }
    return 1;
}

static PyObject *make_record(PyObject *module, PyObject *args)
{
    PyObject *kind, *data, *queue, *fixed;
    Py_ssize_t start, body_end, end;
    long long queue_offset;
    int sys_flag;
    if (!PyArg_ParseTuple(args, "OSnnnLiOO:make_record", &kind, &data, &start, &body_end, &end, &queue_offset, &sys_flag,
                          &queue, &fixed) || !is_kind(module, kind)) {
        return NULL;
    }
    if (start < 0 || start > end - SHORTEST_RECORD || body_end < start || body_end > end - 3 || end > PyBytes_Size(data)) {
        return PyErr_Format(PyExc_ValueError, "no record from %zd to %zd, its body to %zd, of %zd bytes", start, end,
                            body_end, PyBytes_Size(data));
    }
    return (PyObject *)new_record(
        (PyTypeObject *)kind, data, start, body_end, end, queue_offset, sys_flag, queue, fixed);
}

static PyObject *cut_records(PyObject *module, PyObject *args)
{
    PyObject *kind, *data, *queue, *messages, *unusual;
    Py_ssize_t start, until;
    if (!PyArg_ParseTuple(args, "OO!SnnOO:cut_records", &kind, &PyList_Type, &messages, &data, &start, &until, &queue,
                          &unusual) || !is_kind(module, kind)) {
        return NULL;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AsString(data);
    Py_ssize_t size = PyBytes_Size(data);
    if (start < 0 || until > size - SHORTEST_RECORD) {
        return PyErr_Format(PyExc_ValueError, "no records from %zd to %zd in %zd bytes", start, until, size);
    }
    while (start <= until) {
        const unsigned char *head = bytes + start;
        int64_t total = u32_at(head), body_length = u32_at(head + BODY_LENGTH);
        int sys_flag = (int)u32_at(head + SYS_FLAG);
        if (u32_at(head + MAGIC) == MAGIC_V1 && !(sys_flag & UNUSUAL) && total <= size - start &&
            body_length <= total - SHORTEST_RECORD) {
            PyObject *message = (PyObject *)new_record(
                (PyTypeObject *)kind, data, start, start + BODY + (Py_ssize_t)body_length, start + (Py_ssize_t)total,
                i64_at(head + QUEUE_OFFSET), sys_flag, queue, Py_None);
            if (message == NULL || PyList_Append(messages, message) < 0) {
                Py_XDECREF(message);
                return NULL;
            }
            Py_DECREF(message);
            start += (Py_ssize_t)total;
        } else { /* or damaged, which is then told */
            PyObject *at = PyLong_FromSsize_t(start);
            PyObject *stop = at ? PyObject_CallFunctionObjArgs(unusual, at, NULL) : NULL;
            Py_XDECREF(at);
            if (stop == NULL) {
                return NULL;
            }
            Py_ssize_t end = PyLong_AsSsize_t(stop);
            Py_DECREF(stop);
            if (end <= start) {
                return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a record from %zd to %zd", start, end);
            }
            start = end;
        }
    }
    return PyLong_FromSsize_t(start);
}

static PyObject *rising(PyObject *module, PyObject *messages)
{
    State *state = PyModule_GetState(module);
    PyObject *each, *all = PyObject_GetIter(messages);
    int is_first = 1, rises = 1;
    long long before = 0;
    while (all != NULL && rises && (each = PyIter_Next(all)) != NULL) {
        if (!PyObject_TypeCheck(each, state->record_type)) {
            PyErr_Format(PyExc_TypeError, "%R is no message", each);
            rises = 0;
        } else {
            long long offset = ((Record *)each)->queue_offset;
            rises = is_first || offset > before;
            before = offset;
            is_first = 0;
        }
        Py_DECREF(each);
    }
    Py_XDECREF(all);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(rises);
}

/* Note that one message is done; return whether it was not before, or -1. */
static int finish_one(State *state, PyObject *message)
{
    if (!PyObject_TypeCheck(message, state->record_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no message", message);
        return -1;
    }
    Record *record = (Record *)message;
    if (record->done == Py_True) {
        return 0;
    }
    PyObject *before = record->done;
    record->done = Py_NewRef(Py_True);
    Py_XDECREF(before);
    return 1;
}

static PyObject *finish(PyObject *module, PyObject *messages)
{
    State *state = PyModule_GetState(module);
    PyObject *each, *all = PyObject_GetIter(messages);
    Py_ssize_t count = 0;
    while (all != NULL && (each = PyIter_Next(all)) != NULL) {
        int is_new = finish_one(state, each);
        Py_DECREF(each);
        if (is_new < 0) {
            break;
        }
        count += is_new;
    }
    Py_XDECREF(all);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

static PyMethodDef functions[] = {
    {"make_record", make_record, METH_VARARGS, "See pyrocket_consumer.wire.record."},
    {"cut_records", cut_records, METH_VARARGS, "See pyrocket_consumer.wire.record."},
    {"rising", rising, METH_O, "See pyrocket_consumer.wire.record."},
    {"finish", finish, METH_O, "See pyrocket_consumer.wire.record."},
    {NULL},
};

/* --- the module */

static int begin(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->unpacked = PyUnicode_InternFromString("_unpacked");
    state->properties_start = PyUnicode_InternFromString("_properties_start");
    state->get = PyUnicode_InternFromString("get");
    state->record_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &record_spec, NULL);
    if (!state->unpacked || !state->properties_start || !state->get || !state->record_type) {
        return -1;
    }
    if (PyModule_AddIntConstant(module, "REVISION", REVISION) < 0) {
        return -1;
    }
    return PyModule_AddType(module, state->record_type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((State *)PyModule_GetState(module))->record_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->record_type);
    Py_CLEAR(state->unpacked);
    Py_CLEAR(state->properties_start);
    Py_CLEAR(state->get);
    for (int each = 0; each < KEPT_NAMES; each++) {
        Py_CLEAR(state->names[each].text);
    }
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, begin},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pyrocket_consumer.wire._accelerator",
    .m_doc = "The compiled counterpart of parts of pyrocket_consumer.wire; see pyrocket_consumer.wire.accelerator.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__accelerator(void)
{
    return PyModuleDef_Init(&definition);
}
