/* The work for every message, compiled. Each function has a Python counterpart with the same name; read that first. See
   accelerator.py. This file raises no error of the package: it leaves a damaged or unusual record to the Python code,
   which raises it.

   A peer may send any length. Compare each length with the bytes that are there before you use it. */

/* setup.py defines Py_LIMITED_API, so one build serves Python 3.11 and all later versions. A free-threaded Python has no
   limited API and needs its own build. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

#ifndef SOURCE
#error "setup.py defines SOURCE, the digest of this file: see accelerator.py"
#endif

#ifdef Py_GIL_DISABLED
#define BEGIN_LOCKED(object) Py_BEGIN_CRITICAL_SECTION(object);
#define END_LOCKED() Py_END_CRITICAL_SECTION()
#else /* the GIL protects a record from the first read to the last write */
#define BEGIN_LOCKED(object) {
#define END_LOCKED() }
#endif

enum { /* SysFlag */
    COMPRESSED = 0x1,
    BORN_HOST_V6 = 0x10,
    STORE_HOST_V6 = 0x20,
    UNPACK = 0x40 | 0x80, /* NEED_UNWRAP | INNER_BATCH */
    UNUSUAL = BORN_HOST_V6 | STORE_HOST_V6 | COMPRESSED | UNPACK,
};

#define MAGIC_V1 0xDAA320A7u /* topic length in one byte */
enum { MAGIC = 4, QUEUE_OFFSET = 20, SYS_FLAG = 36, BODY_LENGTH = 84, BODY = 88, MIN_RECORD_BYTES = 91 }; /* IPv4 hosts */

static inline uint32_t u32_at(const unsigned char *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline int64_t i64_at(const unsigned char *at)
{
    return (int64_t)((uint64_t)u32_at(at) << 32 | u32_at(at + 4));
}

/* --- names of properties: all messages use the same few names, so their strings are cached */

enum { KEPT_NAMES = 128, MAX_KEPT_BYTES = 47 };

typedef struct {
    PyObject *text; /* NULL: this slot is empty */
    unsigned char length;
    char bytes[MAX_KEPT_BYTES];
} KeptName;

typedef struct {
    PyTypeObject *record_type, *rows_type;
    PyObject *unpack_body, *properties_start, *get; /* names of methods */
    KeptName names[KEPT_NAMES];
} State;

static PyObject *decode_name(State *state, const char *bytes, Py_ssize_t length)
{
#ifndef Py_GIL_DISABLED
    if (length <= MAX_KEPT_BYTES) {
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
        PyObject *before = kept->text; /* not interned: 3.12 never frees interned strings, producers choose names */
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

/* Find the next item with a name and a value, at or after `*at`. Return whether there is one. */
static inline int next_item(const char **at, const char *end, Item *item)
{
    while (*at < end) {
        const char *start = *at;
        const char *stop = memchr(start, 2, (size_t)(end - start));
        if (stop == NULL) {
            stop = end; /* brokers may omit the last separator */
        }
        *at = stop + (stop < end);
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
        PyObject *name = decode_name(state, item.name, item.name_length);
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
    PyObject *data, *queue, *fixed, *body, *properties, *done, *key_lane;
} Record;

static void record_dealloc(PyObject *self);

/* Return the state of this module for a Record or an instance of a subclass. */
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
    Py_VISIT(record->key_lane);
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
    Py_CLEAR(record->key_lane);
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

/* Have the garbage collector track a record from now on, because it may be part of a reference cycle. */
static void track(PyObject *record)
{
    if (!PyObject_GC_IsTracked(record)) {
        PyObject_GC_Track(record);
    }
}

/* Return a new record of `type`. The caller has checked its bounds in `data`.

   The garbage collector does not track it until `properties` or `_key_lane` is set, because only those can refer back
   to the record. Windows hold thousands of records; to traverse them took a seventh of a consumer's CPU time. */
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
        PyObject_GC_UnTrack(record);
    }
    return record;
}

/* Return the bytes that hold a record; NULL, with an exception, if decode_messages did not make it. */
static const unsigned char *bytes_of(Record *record)
{
    if (record->data == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a message without a record: decode_messages makes messages");
        return NULL;
    }
    return (const unsigned char *)PyBytes_AsString(record->data);
}

/* Return the start of the properties. They follow the topic and their length, and end with the record. */
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
            (PyObject *)record, state_of((PyObject *)record)->properties_start, NULL); /* raises the error */
        if (raised != NULL) {
            Py_DECREF(raised);
            PyErr_SetString(PyExc_SystemError, "Python reads a record that the compiled part finds damaged");
        }
        return NULL;
    }
    return (const char *)data + start;
}

static PyObject *record_body(PyObject *self, void *closure)
{
    Record *record = (Record *)self;
    PyObject *body = NULL;
    BEGIN_LOCKED(self)
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
                body = PyObject_CallMethodObjArgs(self, state_of(self)->unpack_body, stored, NULL);
                Py_DECREF(stored);
            }
        }
        if (body != NULL) {
            PyObject *before = record->body;
            record->body = Py_NewRef(body);
            Py_XDECREF(before);
        }
    }
    END_LOCKED()
    return body;
}

/* Return a new reference to the properties, which the record caches. */
static PyObject *cached_properties(Record *record)
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
        track((PyObject *)record);
    }
    return Py_NewRef(record->properties);
}

static PyObject *record_properties(PyObject *self, void *closure)
{
    PyObject *properties;
    BEGIN_LOCKED(self)
    properties = cached_properties((Record *)self);
    END_LOCKED()
    return properties;
}

/* Return `dictionary.get(name)`. */
static PyObject *call_get(State *state, PyObject *dictionary, PyObject *name)
{
    return PyObject_CallMethodObjArgs(dictionary, state->get, name, NULL);
}

/* Return the property `name` of a text: the value of its last item with that name and a value. */
static PyObject *property_in(State *state, const char *text, const char *end, PyObject *name)
{
    if (!PyUnicode_Check(name)) {
        return PyErr_Format(PyExc_TypeError, "a property's name is a str, not %R", (PyObject *)Py_TYPE(name));
    }
    Py_ssize_t length;
    const char *wanted = PyUnicode_AsUTF8AndSize(name, &length);
    if (wanted == NULL) { /* half of a surrogate pair, which no UTF-8 text contains */
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            return NULL;
        }
        PyErr_Clear();
        return Py_NewRef(Py_None);
    }
    for (Py_ssize_t index = 0; index + 2 < length; index++) { /* U+FFFD replaces any bytes that are not UTF-8 */
        if (memcmp(wanted + index, "\xef\xbf\xbd", 3) == 0) {
            PyObject *properties = properties_in(state, text, end);
            PyObject *value = properties ? call_get(state, properties, name) : NULL;
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

static PyObject *record_property(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    Record *record = (Record *)self;
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    if (count + named != 1 || (named && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "name") != 0)) {
        PyErr_SetString(PyExc_TypeError, "property() takes one argument, the name of a property");
        return NULL;
    }
    PyObject *name = arguments[0], *value = NULL;
    BEGIN_LOCKED(self)
    if (record->properties != NULL && record->properties != Py_None) {
        value = call_get(state_of(self), record->properties, name);
    } else {
        const char *text = properties_of(record);
        if (text != NULL) {
            value = property_in(state_of(self), text, PyBytes_AsString(record->data) + record->end, name);
        }
    }
    END_LOCKED()
    return value;
}

static PyObject *record_key_lane(PyObject *self, void *closure)
{
    PyObject *lane;
    BEGIN_LOCKED(self)
    lane = Py_XNewRef(((Record *)self)->key_lane);
    END_LOCKED()
    if (lane == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_key_lane");
    }
    return lane;
}

static int record_set_key_lane(PyObject *self, PyObject *lane, void *closure)
{
    PyObject *before;
    BEGIN_LOCKED(self)
    before = ((Record *)self)->key_lane;
    ((Record *)self)->key_lane = Py_XNewRef(lane);
    track(self);
    END_LOCKED()
    Py_XDECREF(before);
    return 0;
}

static PyMemberDef record_members[] = {
    {"queue_offset", T_LONGLONG, offsetof(Record, queue_offset), 0, "Its offset in its queue."},
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
    {NULL},
};

static PyGetSetDef record_getset[] = {
    {"body", record_body, NULL, "The body as sent, decompressed; b\"\" for a message without a body.", NULL},
    {"properties", record_properties, NULL, "All properties, including the reserved ones (see PropertyName).", NULL},
    {"_key_lane", record_key_lane, record_set_key_lane, NULL, NULL},
    {NULL},
};

static PyMethodDef record_methods[] = {
    {"property", (PyCFunction)(void (*)(void))record_property, METH_FASTCALL | METH_KEYWORDS,
     "property($self, /, name)\n--\n\nReturn the property `name`, None when it is absent."},
    {NULL},
};

static PyType_Slot record_slots[] = {
    {Py_tp_doc, "A stored record, read in place. See pyrocket_consumer.protocol.record."},
    {Py_tp_members, record_members},
    {Py_tp_getset, record_getset},
    {Py_tp_methods, record_methods},
    {Py_tp_traverse, record_traverse},
    {Py_tp_clear, record_clear},
    {Py_tp_dealloc, record_dealloc},
    {0, NULL},
};

static PyType_Spec record_spec = {
    .name = "pyrocket_consumer.protocol._accelerator.Record",
    .basicsize = sizeof(Record),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = record_slots,
};

/* --- functions: see record.py */

/* Return whether `kind` is a subclass of Record; if not, set TypeError. */
static int is_kind(PyObject *module, PyObject *kind)
{
    State *state = PyModule_GetState(module);
    if (!PyType_Check(kind) || !PyType_IsSubtype((PyTypeObject *)kind, state->record_type)) {
        PyErr_Format(PyExc_TypeError, "%R is not a type of Record", kind);
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
    if (start < 0 || start > end - MIN_RECORD_BYTES || body_end < start || body_end > end - 3 ||
        end > PyBytes_Size(data)) {
        return PyErr_Format(PyExc_ValueError, "no record from %zd to %zd, its body to %zd, of %zd bytes", start, end,
                            body_end, PyBytes_Size(data));
    }
    PyObject *record = (PyObject *)new_record(
        (PyTypeObject *)kind, data, start, body_end, end, queue_offset, sys_flag, queue, fixed);
    if (record != NULL) {
        track(record); /* its type may hold more references; decode_records makes only Message */
    }
    return record;
}

static PyObject *decode_records(PyObject *module, PyObject *args)
{
    PyObject *kind, *data, *queue, *messages, *decode_unusual;
    Py_ssize_t start, until;
    if (!PyArg_ParseTuple(args, "OO!SnnOO:decode_records", &kind, &PyList_Type, &messages, &data, &start, &until, &queue,
                          &decode_unusual) || !is_kind(module, kind)) {
        return NULL;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AsString(data);
    Py_ssize_t size = PyBytes_Size(data);
    if (start < 0 || until > size - MIN_RECORD_BYTES) {
        return PyErr_Format(PyExc_ValueError, "no records from %zd to %zd in %zd bytes", start, until, size);
    }
    while (start <= until) {
        const unsigned char *head = bytes + start;
        int64_t total = u32_at(head), body_length = u32_at(head + BODY_LENGTH);
        int sys_flag = (int)u32_at(head + SYS_FLAG);
        if (u32_at(head + MAGIC) == MAGIC_V1 && !(sys_flag & UNUSUAL) && total <= size - start &&
            body_length <= total - MIN_RECORD_BYTES) {
            PyObject *message = (PyObject *)new_record(
                (PyTypeObject *)kind, data, start, start + BODY + (Py_ssize_t)body_length, start + (Py_ssize_t)total,
                i64_at(head + QUEUE_OFFSET), sys_flag, queue, Py_None);
            if (message == NULL || PyList_Append(messages, message) < 0) {
                Py_XDECREF(message);
                return NULL;
            }
            Py_DECREF(message);
            start += (Py_ssize_t)total;
        } else { /* or damaged: decode_unusual raises the error */
            PyObject *at = PyLong_FromSsize_t(start);
            PyObject *stop = at ? PyObject_CallFunctionObjArgs(decode_unusual, at, NULL) : NULL;
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

static PyObject *are_offsets_rising(PyObject *module, PyObject *messages)
{
    State *state = PyModule_GetState(module);
    PyObject *each, *all = PyObject_GetIter(messages);
    int is_first = 1, rises = 1;
    long long before = 0;
    while (all != NULL && rises && (each = PyIter_Next(all)) != NULL) {
        if (!PyObject_TypeCheck(each, state->record_type)) {
            PyErr_Format(PyExc_TypeError, "%R is not a message", each);
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

/* Mark one message as done. Return 1 if it was not done before, 0 if it was, -1 with an exception. */
static int mark_one_done(State *state, PyObject *message)
{
    if (!PyObject_TypeCheck(message, state->record_type)) {
        PyErr_Format(PyExc_TypeError, "%R is not a message", message);
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

static PyObject *mark_done(PyObject *module, PyObject *messages)
{
    State *state = PyModule_GetState(module);
    PyObject *each, *all = PyObject_GetIter(messages);
    Py_ssize_t count = 0;
    while (all != NULL && (each = PyIter_Next(all)) != NULL) {
        int is_new = mark_one_done(state, each);
        Py_DECREF(each);
        if (is_new < 0) {
            break;
        }
        count += is_new;
    }
    Py_XDECREF(all);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

/* --- RecordRows: the records of many responses, for columns.py, which has the same code with numpy

   A column is a tuple of Arrow's buffers. The first one is the validity bitmap, or None if no value is missing. The
   values follow: numbers in one buffer; texts in two, the start of each text and then the bytes of all. */

enum { IRREGULAR, REGULAR, FAILED }; /* the Python code must read it; everything was read; an exception is set */
enum {
    FLAG = 16, COMMIT_LOG_OFFSET = 28, BORN_AT = 40, BORN_HOST = 48, STORED_AT = 56, STORE_HOST = 64, RECONSUME_TIMES = 72,
    MORE_FOR_V6 = 12, MAX_HOST_BYTES = 26, MAX_ID_BYTES = 56,
    MAX_ITEMS = 64, /* per record, because each name is compared with all others */
};
#define MAGIC_V2 0xDAA320ABu /* topic length in two bytes */

static const int64_t MIN_MS = -62135596800000, MAX_MS = 253402300799999; /* the range of datetime */

typedef struct {
    const char *bytes; /* NULL: no text */
    size_t length;
} Text;

typedef struct { /* offsets in the properties text, which has at most 65,535 bytes */
    uint16_t name, name_length, value, value_length;
} Span;

typedef struct {
    const unsigned char *start;
    uint32_t body_end, properties, end; /* offsets from `start`; find_spans sets properties */
    int sys_flag;
    uint32_t response, item_count;
    size_t first_item;
} Row;

typedef struct {
    PyObject_HEAD
    Py_buffer *responses; /* exported buffers, so that nothing frees or moves them */
    size_t response_count, row_count, row_capacity, item_count, item_capacity;
    Row *rows;
    Span *items;
    int has_items;
} RecordRows;

static inline uint32_t u16_at(const unsigned char *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

static inline uint32_t born_v6(const Row *row)
{
    return row->sys_flag & BORN_HOST_V6 ? MORE_FOR_V6 : 0;
}

static inline uint32_t store_v6(const Row *row)
{
    return row->sys_flag & STORE_HOST_V6 ? MORE_FOR_V6 : 0;
}

/* Grow an array if it has no space for one more item of `size` bytes. */
static int ensure_capacity(void **array, size_t count, size_t *capacity, size_t size)
{
    if (count < *capacity) {
        return 1;
    }
    size_t wanted = *capacity ? *capacity * 2 : 1024;
    void *larger = wanted > (size_t)PY_SSIZE_T_MAX / size ? NULL : PyMem_Realloc(*array, wanted * size);
    if (larger == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    *array = larger;
    *capacity = wanted;
    return 1;
}

/* Add a row for each record of a response whose offset is at least `first` and less than `end`. */
static int add_rows(
    RecordRows *self, uint32_t response, const unsigned char *at, size_t left, int64_t first, int64_t end,
    size_t max_records)
{
    for (size_t count = 0; left >= MIN_RECORD_BYTES; count++) {
        uint32_t size = u32_at(at), magic = u32_at(at + MAGIC);
        Row row = {.start = at, .end = size, .response = response, .sys_flag = (int)u32_at(at + SYS_FLAG)};
        uint32_t shift = born_v6(&row) + store_v6(&row);
        if (count == max_records || size > left || size < MIN_RECORD_BYTES + shift ||
            (row.sys_flag & UNPACK) == UNPACK || (magic != MAGIC_V1 && magic != MAGIC_V2)) {
            return IRREGULAR;
        }
        uint32_t body_length = u32_at(at + shift + BODY_LENGTH);
        if (body_length > size - shift - MIN_RECORD_BYTES) {
            return IRREGULAR;
        }
        row.body_end = BODY + shift + body_length;
        int64_t offset = i64_at(at + QUEUE_OFFSET);
        if (first <= offset && offset < end) {
            if (!ensure_capacity((void **)&self->rows, self->row_count, &self->row_capacity, sizeof(Row))) {
                return FAILED;
            }
            self->rows[self->row_count++] = row;
        }
        at += size;
        left -= size;
    }
    return left ? IRREGULAR : REGULAR;
}

/* --- properties of rows */

static int is_utf8(const unsigned char *at, const unsigned char *end)
{
    while (at < end) {
        uint64_t eight;
        if (end - at >= 8 && (memcpy(&eight, at, 8), !(eight & 0x8080808080808080u))) {
            at += 8;
            continue;
        }
        unsigned char first = *at++;
        if (first < 0x80) {
            continue;
        }
        int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4 || end - at < more) {
            return 0;
        }
        unsigned char lowest = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80; /* below: an overlong form */
        unsigned char highest = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF; /* above: surrogates, beyond Unicode */
        if (*at < lowest || *at > highest) {
            return 0;
        }
        for (at++; --more > 0; at++) {
            if ((*at & 0xC0) != 0x80) {
                return 0;
            }
        }
    }
    return 1;
}

static inline Text name_at(const Row *row, const Span *span)
{
    return (Text){(const char *)row->start + row->properties + span->name, span->name_length};
}

static inline Text value_at(const Row *row, const Span *span)
{
    return (Text){(const char *)row->start + row->properties + span->value, span->value_length};
}

/* Return the span of the property `name` in a row, NULL if the row does not have it. */
static Span *span_of(const RecordRows *self, const Row *row, const char *name, size_t length)
{
    for (Span *span = self->items + row->first_item, *end = span + row->item_count; span < end; span++) {
        if (span->name_length == length && memcmp(name_at(row, span).bytes, name, length) == 0) {
            return span;
        }
    }
    return NULL;
}

/* Find the properties of a row. If items have the same name, the value of the last one counts. */
static int find_spans(RecordRows *self, Row *row)
{
    const unsigned char *topic = row->start + row->body_end;
    size_t topic_size = u32_at(row->start + MAGIC) == MAGIC_V1 ? topic[0] + 3u : u16_at(topic) + 4;
    size_t properties = row->body_end + topic_size;
    if (properties > row->end || properties + u16_at(row->start + properties - 2) != row->end) {
        return IRREGULAR;
    }
    row->properties = (uint32_t)properties;
    const char *text = (const char *)row->start + row->properties, *end = (const char *)row->start + row->end;
    if (!is_utf8((const unsigned char *)text, (const unsigned char *)end)) {
        return IRREGULAR;
    }
    row->first_item = self->item_count;
    row->item_count = 0;
    Item item;
    for (const char *next = text; next_item(&next, end, &item);) {
        Span *span = NULL;
        if (row->item_count) {
            span = span_of(self, row, item.name, (size_t)item.name_length);
        }
        if (span == NULL) {
            if (row->item_count == MAX_ITEMS) {
                return IRREGULAR;
            }
            if (!ensure_capacity((void **)&self->items, self->item_count, &self->item_capacity, sizeof(Span))) {
                return FAILED;
            }
            span = &self->items[self->item_count++];
            span->name = (uint16_t)(item.name - text);
            span->name_length = (uint16_t)item.name_length;
            row->item_count++;
        }
        span->value = (uint16_t)(item.value - text);
        span->value_length = (uint16_t)item.value_length;
    }
    return REGULAR;
}

static int find_all_spans(RecordRows *self)
{
    if (!self->has_items) {
        self->item_count = 0;
        for (size_t each = 0; each < self->row_count; each++) {
            int found = find_spans(self, &self->rows[each]);
            if (found != REGULAR) {
                return found;
            }
        }
        self->has_items = 1;
    }
    return REGULAR;
}

/* --- columns */

/* Create a bytes object for `count` items of `size` bytes. Return a pointer to its content. */
static void *new_bytes(PyObject **bytes, size_t count, size_t size)
{
    *bytes = count > (size_t)PY_SSIZE_T_MAX / 2 / size
                 ? PyErr_NoMemory()
                 : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * size));
    return *bytes ? PyBytes_AsString(*bytes) : NULL;
}

/* Return Arrow's validity bitmap; None if all rows have a value. */
static PyObject *validity_bits(const Text *texts, size_t count)
{
    size_t missing = 0;
    for (size_t each = 0; each < count; each++) {
        missing += texts[each].bytes == NULL;
    }
    if (!missing) {
        return Py_NewRef(Py_None);
    }
    PyObject *bytes;
    unsigned char *bits = new_bytes(&bytes, count / 8 + 1, 1);
    if (bits != NULL) {
        memset(bits, 0, count / 8 + 1);
        for (size_t each = 0; each < count; each++) {
            bits[each / 8] |= (unsigned char)((texts[each].bytes != NULL) << each % 8);
        }
    }
    return bytes;
}

/* Return the start of each text and the bytes of all texts; None if they are too long for 32-bit offsets. */
static PyObject *join_texts(const Text *texts, size_t count)
{
    size_t size = 0;
    PyObject *offsets, *data;
    int32_t *starts = new_bytes(&offsets, count + 1, sizeof(int32_t));
    if (starts == NULL) {
        return NULL;
    }
    for (size_t each = 0; each < count; each++) {
        starts[each] = (int32_t)size;
        size += texts[each].length;
        if (size > INT32_MAX) {
            Py_DECREF(offsets);
            return Py_NewRef(Py_None);
        }
    }
    starts[count] = (int32_t)size;
    char *at = new_bytes(&data, size, 1);
    if (at == NULL) {
        Py_DECREF(offsets);
        return NULL;
    }
    for (size_t each = 0; each < count; each++) {
        if (texts[each].length) {
            memcpy(at, texts[each].bytes, texts[each].length);
            at += texts[each].length;
        }
    }
    return Py_BuildValue("(NN)", offsets, data);
}

static char *write_number(char *at, uint32_t number)
{
    char digits[10];
    int count = 0;
    do {
        digits[count++] = (char)('0' + number % 10);
    } while (number /= 10);
    while (count) {
        *at++ = digits[--count];
    }
    return at;
}

static char *write_hex(char *at, const unsigned char *bytes, size_t count)
{
    for (size_t each = 0; each < count; each++) {
        *at++ = "0123456789ABCDEF"[bytes[each] >> 4];
        *at++ = "0123456789ABCDEF"[bytes[each] & 15];
    }
    return at;
}

static Text body_of(const RecordRows *self, const Row *row, char *scratch)
{
    uint32_t start = BODY + born_v6(row) + store_v6(row);
    return (Text){(const char *)row->start + start, row->body_end - start};
}

static Text born_host_of(const RecordRows *self, const Row *row, char *scratch)
{
    return (Text){(const char *)row->start + BORN_HOST, 8 + born_v6(row)};
}

static Text store_host_of(const RecordRows *self, const Row *row, char *scratch)
{
    return (Text){(const char *)row->start + STORE_HOST + born_v6(row), 8 + store_v6(row)};
}

static Text host_text(Text host, char *scratch)
{
    if (host.length != 8) {
        return (Text){NULL, 0}; /* Python formats IPv6 addresses */
    }
    char *at = scratch;
    const unsigned char *bytes = (const unsigned char *)host.bytes;
    for (int each = 0; each < 4; each++) {
        at = write_number(at, bytes[each]);
        *at++ = each < 3 ? '.' : ':';
    }
    at = write_number(at, u32_at(bytes + 4));
    return (Text){scratch, (size_t)(at - scratch)};
}

static Text born_host_text_of(const RecordRows *self, const Row *row, char *scratch)
{
    return host_text(born_host_of(self, row, NULL), scratch);
}

static Text store_host_text_of(const RecordRows *self, const Row *row, char *scratch)
{
    return host_text(store_host_of(self, row, NULL), scratch);
}

static Text property_of(const RecordRows *self, const Row *row, const char *name)
{
    const Span *span = span_of(self, row, name, strlen(name));
    return span ? value_at(row, span) : (Text){NULL, 0};
}

static Text tags_of(const RecordRows *self, const Row *row, char *scratch)
{
    return property_of(self, row, "TAGS");
}

static Text keys_of(const RecordRows *self, const Row *row, char *scratch)
{
    return property_of(self, row, "KEYS");
}

static Text retry_topic_of(const RecordRows *self, const Row *row, char *scratch)
{
    return property_of(self, row, "RETRY_TOPIC");
}

/* Return the id that the producer gave, or the offset message id without one. */
static Text message_id_of(const RecordRows *self, const Row *row, char *scratch)
{
    Text unique = property_of(self, row, "UNIQ_KEY");
    if (unique.bytes != NULL) {
        return unique;
    }
    Text host = store_host_of(self, row, NULL);
    char *at = write_hex(scratch, (const unsigned char *)host.bytes, host.length);
    at = write_hex(at, row->start + COMMIT_LOG_OFFSET, 8);
    return (Text){scratch, (size_t)(at - scratch)};
}

typedef struct {
    const char *name;
    Text (*text_of)(const RecordRows *self, const Row *row, char *scratch);
    int scratch_size, is_of_properties;
} TextColumn;

static const TextColumn TEXT_COLUMNS[] = {
    {"body", body_of, 0, 0},
    {"msgId", message_id_of, MAX_ID_BYTES, 1},
    {"tags", tags_of, 0, 1},
    {"keys", keys_of, 0, 1},
    {"RETRY_TOPIC", retry_topic_of, 0, 1},
    {"bornHost", born_host_text_of, MAX_HOST_BYTES, 0},
    {"storeHost", store_host_text_of, MAX_HOST_BYTES, 0},
    {"bornHost as stored", born_host_of, 0, 0},
    {"storeHost as stored", store_host_of, 0, 0},
};

static PyObject *text_column(RecordRows *self, const TextColumn *column)
{
    size_t count = self->row_count, scratch_size = (size_t)column->scratch_size;
    Text *texts = PyMem_Calloc(count + 1, sizeof(Text) + scratch_size);
    if (texts == NULL) {
        return PyErr_NoMemory();
    }
    char *scratch = (char *)(texts + count + 1);
    for (size_t each = 0; each < count; each++) {
        texts[each] = column->text_of(self, &self->rows[each], scratch + each * scratch_size);
    }
    PyObject *present = validity_bits(texts, count), *pair = present ? join_texts(texts, count) : NULL, *buffers = NULL;
    if (pair != NULL && pair != Py_None) {
        buffers = PyTuple_Pack(3, present, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
    } else if (pair != NULL) {
        buffers = Py_NewRef(Py_None);
    }
    Py_XDECREF(present);
    Py_XDECREF(pair);
    PyMem_Free(texts);
    return buffers;
}

static PyObject *map_column(RecordRows *self)
{
    size_t count = self->row_count, items = 0, item = 0;
    for (size_t each = 0; each < count; each++) {
        items += self->rows[each].item_count;
    }
    if (items > INT32_MAX) {
        return Py_NewRef(Py_None);
    }
    Text *names = PyMem_Calloc(2 * items + 1, sizeof(Text)), *values = names ? names + items : NULL;
    if (names == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *firsts, *all_names = NULL, *all_values = NULL, *map = NULL;
    int32_t *first = new_bytes(&firsts, count + 1, sizeof(int32_t));
    if (first != NULL) {
        for (size_t each = 0; each < count; each++) {
            const Row *row = &self->rows[each];
            const Span *spans = self->items + row->first_item;
            first[each] = (int32_t)item;
            for (uint32_t other = 0; other < row->item_count; other++, item++) {
                names[item] = name_at(row, &spans[other]);
                values[item] = value_at(row, &spans[other]);
            }
        }
        first[count] = (int32_t)item;
        all_names = join_texts(names, items);
        all_values = all_names ? join_texts(values, items) : NULL;
    }
    if (all_values != NULL) {
        map = all_names == Py_None || all_values == Py_None ? Py_NewRef(Py_None)
                                                            : PyTuple_Pack(3, firsts, all_names, all_values);
    }
    Py_XDECREF(firsts);
    Py_XDECREF(all_names);
    Py_XDECREF(all_values);
    PyMem_Free(names);
    return map;
}

typedef struct {
    const char *name;
    int offset, is_long, is_time, follows_born_v6, follows_store_v6;
} NumberColumn;

static const NumberColumn NUMBER_COLUMNS[] = {
    {"queueOffset", QUEUE_OFFSET, 1, 0, 0, 0},
    {"flag", FLAG, 0, 0, 0, 0},
    {"sysFlag", SYS_FLAG, 0, 0, 0, 0},
    {"reconsumeTimes", RECONSUME_TIMES, 0, 0, 1, 1},
    {"bornTimestamp", BORN_AT, 1, 1, 0, 0},
    {"storeTimestamp", STORED_AT, 1, 1, 1, 0},
};

static PyObject *number_column(RecordRows *self, const NumberColumn *column)
{
    size_t count = self->row_count, missing = 0;
    PyObject *values, *present = NULL, *buffers = NULL;
    void *numbers = new_bytes(&values, count, column->is_long ? sizeof(int64_t) : sizeof(int32_t));
    unsigned char *bits = numbers ? new_bytes(&present, count / 8 + 1, 1) : NULL;
    if (bits != NULL) {
        memset(bits, 0xFF, count / 8 + 1);
        for (size_t each = 0; each < count; each++) {
            const Row *row = &self->rows[each];
            const unsigned char *at = row->start + column->offset;
            at += (column->follows_born_v6 ? born_v6(row) : 0) + (column->follows_store_v6 ? store_v6(row) : 0);
            if (!column->is_long) {
                ((int32_t *)numbers)[each] = (int32_t)u32_at(at);
                continue;
            }
            int64_t number = i64_at(at);
            if (column->is_time && (number < MIN_MS || number > MAX_MS)) {
                bits[each / 8] &= (unsigned char)~(1u << each % 8);
                missing++;
                number = 0;
            }
            ((int64_t *)numbers)[each] = column->is_time ? number * 1000 : number;
        }
        buffers = PyTuple_Pack(2, missing ? present : Py_None, values);
    }
    Py_XDECREF(values);
    Py_XDECREF(present);
    return buffers;
}

static PyObject *find_column(RecordRows *self, const char *name)
{
    for (size_t each = 0; each < sizeof NUMBER_COLUMNS / sizeof *NUMBER_COLUMNS; each++) {
        if (strcmp(name, NUMBER_COLUMNS[each].name) == 0) {
            return number_column(self, &NUMBER_COLUMNS[each]);
        }
    }
    const TextColumn *column = NULL;
    for (size_t each = 0; each < sizeof TEXT_COLUMNS / sizeof *TEXT_COLUMNS; each++) {
        if (strcmp(name, TEXT_COLUMNS[each].name) == 0) {
            column = &TEXT_COLUMNS[each];
        }
    }
    if (column == NULL && strcmp(name, "properties") != 0) {
        return PyErr_Format(PyExc_KeyError, "no column %s", name);
    }
    if (column == NULL || column->is_of_properties) {
        int found = find_all_spans(self);
        if (found != REGULAR) {
            return found == FAILED ? NULL : Py_NewRef(Py_None);
        }
    }
    return column ? text_column(self, column) : map_column(self);
}

static PyObject *rows_column(PyObject *self, PyObject *name)
{
    if (!PyUnicode_Check(name)) {
        return PyErr_Format(PyExc_TypeError, "a column's name is a str, not %R", (PyObject *)Py_TYPE(name));
    }
    const char *wanted = PyUnicode_AsUTF8AndSize(name, NULL);
    PyObject *column = NULL;
    if (wanted != NULL) {
        BEGIN_LOCKED(self)
        column = find_column((RecordRows *)self, wanted);
        END_LOCKED()
    }
    return column;
}

static int has_one_of(Text tag, const Text *tags, Py_ssize_t count)
{
    for (Py_ssize_t each = 0; tag.bytes != NULL && each < count; each++) {
        if (tags[each].length == tag.length && memcmp(tags[each].bytes, tag.bytes, tag.length) == 0) {
            return 1;
        }
    }
    return 0;
}

static PyObject *rows_filter_tags(PyObject *object, PyObject *args)
{
    PyObject *names, *chosen = NULL;
    if (!PyArg_ParseTuple(args, "O!:filter_tags", &PyTuple_Type, &names)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(names);
    Text *tags = PyMem_Calloc((size_t)count + 1, sizeof(Text));
    if (tags == NULL) {
        return PyErr_NoMemory();
    }
    for (Py_ssize_t each = 0; each < count; each++) {
        char *bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(names, each), &bytes, &length) < 0) {
            PyMem_Free(tags);
            return NULL;
        }
        tags[each] = (Text){bytes, (size_t)length};
    }
    BEGIN_LOCKED(object)
    RecordRows *self = (RecordRows *)object;
    int found = find_all_spans(self);
    if (found == REGULAR) {
        size_t kept = 0;
        for (size_t each = 0; each < self->row_count; each++) {
            if (has_one_of(tags_of(self, &self->rows[each], NULL), tags, count)) {
                self->rows[kept++] = self->rows[each];
            }
        }
        self->row_count = kept;
    }
    chosen = found == FAILED ? NULL : PyBool_FromLong(found == REGULAR);
    END_LOCKED()
    PyMem_Free(tags);
    return chosen;
}

static PyObject *rows_count(PyObject *self, void *closure)
{
    return PyLong_FromSize_t(((RecordRows *)self)->row_count);
}

static PyObject *rows_responses(PyObject *object, void *closure)
{
    PyObject *bytes;
    BEGIN_LOCKED(object)
    RecordRows *self = (RecordRows *)object;
    int32_t *responses = new_bytes(&bytes, self->row_count, sizeof(int32_t));
    for (size_t each = 0; responses != NULL && each < self->row_count; each++) {
        responses[each] = (int32_t)self->rows[each].response;
    }
    END_LOCKED()
    return bytes;
}

static PyObject *rows_compressed(PyObject *object, void *closure)
{
    int compressed = 0;
    BEGIN_LOCKED(object)
    RecordRows *self = (RecordRows *)object;
    for (size_t each = 0; each < self->row_count; each++) {
        compressed |= self->rows[each].sys_flag & COMPRESSED;
    }
    END_LOCKED()
    return PyBool_FromLong(compressed);
}

static void rows_dealloc(PyObject *object)
{
    RecordRows *self = (RecordRows *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (size_t each = 0; each < self->response_count; each++) {
        PyBuffer_Release(&self->responses[each]);
    }
    PyMem_Free(self->responses);
    PyMem_Free(self->rows);
    PyMem_Free(self->items);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int rows_traverse(PyObject *object, visitproc visit, void *arg)
{
    RecordRows *self = (RecordRows *)object;
    Py_VISIT(Py_TYPE(object));
    for (size_t each = 0; each < self->response_count; each++) {
        Py_VISIT(self->responses[each].obj);
    }
    return 0;
}

static PyMethodDef rows_methods[] = {
    {"column", rows_column, METH_O, "Return the Arrow buffers of a column, None if the Python code must read it."},
    {"filter_tags", rows_filter_tags, METH_VARARGS,
     "Keep the rows with one of the tags. Return whether all tags could be read."},
    {NULL},
};

static PyGetSetDef rows_getset[] = {
    {"count", rows_count, NULL, "How many rows there are.", NULL},
    {"responses", rows_responses, NULL, "The index of the response of each row, as 32-bit numbers.", NULL},
    {"compressed", rows_compressed, NULL, "Whether any body is compressed.", NULL},
    {NULL},
};

static PyType_Slot rows_slots[] = {
    {Py_tp_doc, "The records of pull responses. See pyrocket_consumer.protocol.columns."},
    {Py_tp_methods, rows_methods},
    {Py_tp_getset, rows_getset},
    {Py_tp_traverse, rows_traverse},
    {Py_tp_dealloc, rows_dealloc},
    {0, NULL},
};

static PyType_Spec rows_spec = {
    .name = "pyrocket_consumer.protocol._accelerator.RecordRows",
    .basicsize = sizeof(RecordRows),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = rows_slots,
};

/* Add one response: (data, start, stop, first offset, end offset). The end offset is exclusive. */
static int add_response(RecordRows *self, PyObject *response, Py_ssize_t max_records)
{
    PyObject *data;
    Py_ssize_t start, stop;
    long long first, end;
    if (!PyTuple_Check(response)) {
        PyErr_Format(PyExc_TypeError, "a response is a tuple, not %R", (PyObject *)Py_TYPE(response));
        return FAILED;
    }
    if (!PyArg_ParseTuple(response, "OnnLL", &data, &start, &stop, &first, &end)) {
        return FAILED;
    }
    Py_buffer *held = &self->responses[self->response_count];
    if (PyObject_GetBuffer(data, held, PyBUF_SIMPLE) < 0) {
        return FAILED;
    }
    uint32_t number = (uint32_t)self->response_count++;
    if (start < 0 || stop < start || stop > held->len) {
        PyErr_Format(PyExc_ValueError, "no records from %zd to %zd in %zd bytes", start, stop, held->len);
        return FAILED;
    }
    return add_rows(self, number, (const unsigned char *)held->buf + start, (size_t)(stop - start), first, end,
                    (size_t)max_records);
}

static PyObject *find_rows(PyObject *module, PyObject *args)
{
    State *state = PyModule_GetState(module);
    PyObject *responses;
    Py_ssize_t max_records;
    if (!PyArg_ParseTuple(args, "O!n:find_rows", &PyTuple_Type, &responses, &max_records)) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(responses);
    RecordRows *self = (RecordRows *)PyType_GenericAlloc(state->rows_type, 0);
    if (self == NULL) {
        return NULL;
    }
    int found = REGULAR;
    self->responses = count > INT32_MAX ? NULL : PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    if (self->responses == NULL) {
        PyErr_NoMemory();
        found = FAILED;
    }
    for (Py_ssize_t each = 0; found == REGULAR && each < count; each++) {
        found = add_response(self, PyTuple_GetItem(responses, each), max_records);
    }
    if (found != REGULAR) {
        Py_DECREF(self);
        return found == FAILED ? NULL : Py_NewRef(Py_None);
    }
    return (PyObject *)self;
}

static PyMethodDef functions[] = {
    {"make_record", make_record, METH_VARARGS, "See pyrocket_consumer.protocol.record."},
    {"decode_records", decode_records, METH_VARARGS, "See pyrocket_consumer.protocol.record."},
    {"are_offsets_rising", are_offsets_rising, METH_O, "See pyrocket_consumer.protocol.record."},
    {"mark_done", mark_done, METH_O, "See pyrocket_consumer.protocol.record."},
    {"find_rows", find_rows, METH_VARARGS, "See pyrocket_consumer.protocol.columns."},
    {NULL},
};

/* --- the module */

static int execute(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->unpack_body = PyUnicode_InternFromString("_unpack_body");
    state->properties_start = PyUnicode_InternFromString("_properties_start");
    state->get = PyUnicode_InternFromString("get");
    state->record_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &record_spec, NULL);
    state->rows_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &rows_spec, NULL);
    if (!state->rows_type || !state->unpack_body || !state->properties_start || !state->get || !state->record_type) {
        return -1;
    }
    if (PyModule_AddStringConstant(module, "SOURCE", SOURCE) < 0) {
        return -1;
    }
    return PyModule_AddType(module, state->record_type);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((State *)PyModule_GetState(module))->record_type);
    Py_VISIT(((State *)PyModule_GetState(module))->rows_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->record_type);
    Py_CLEAR(state->rows_type);
    Py_CLEAR(state->unpack_body);
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
    {Py_mod_exec, execute},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}, /* see PyInit__accelerator */
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pyrocket_consumer.protocol._accelerator",
    .m_doc = "The compiled counterpart of parts of pyrocket_consumer.protocol; see pyrocket_consumer.protocol.accelerator.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__accelerator(void)
{
    if (Py_Version >= 0x030c0000) { /* later versions have a slot that the stable ABI of 3.11 does not */
        enum { MULTIPLE_INTERPRETERS = 3, EACH_MAY_HAVE_ITS_GIL = 2 }; /* the module has no global state */
        size_t last = sizeof(module_slots) / sizeof(module_slots[0]) - 2;
        module_slots[last] = (PyModuleDef_Slot){MULTIPLE_INTERPRETERS, (void *)(intptr_t)EACH_MAY_HAVE_ITS_GIL};
    }
    return PyModuleDef_Init(&definition);
}
