/* The inner loops of a choice of victims: what loops.py says in Python, to the same result.

   Compiled when choices have become many, for the Python that runs (Python.h), and called with the interpreter's lock held.
   Scores are compared as the doubles they are; a score or a time that is no float (somebody's own policy) gives None, and the
   caller goes on in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A candidate in the heap: a victim, as loops.py calls it, and where the next one comes from: a bucket (its iterator) or what
   is left of a node. */
typedef struct {
    long level;
    double score, active;
    Py_ssize_t number, chunk;
    Py_ssize_t source; /* index of a bucket, or ~index of a rest */
} entry;

/* What is left of a node that has given up chunks: the scores of a stretch of them. */
typedef struct {
    PyObject *level, *active, *number, *scores; /* scores: a list or a tuple of floats */
    Py_ssize_t first, place;
} rest;

typedef struct {
    entry *heap;
    Py_ssize_t size;
    rest *rests;
    Py_ssize_t count, room;
    int foreign; /* something was no float */
} merge;

static inline int before(const entry *a, const entry *b) {
    if (a->level != b->level) return a->level < b->level;
    if (a->score != b->score) return a->score < b->score;
    if (a->active != b->active) return a->active < b->active;
    if (a->number != b->number) return a->number < b->number;
    return a->chunk < b->chunk;
}

static void sink(merge *m, Py_ssize_t at) {
    entry moved = m->heap[at];
    for (;;) {
        Py_ssize_t child = 2 * at + 1;
        if (child >= m->size) break;
        if (child + 1 < m->size && before(&m->heap[child + 1], &m->heap[child])) child++;
        if (!before(&m->heap[child], &moved)) break;
        m->heap[at] = m->heap[child];
        at = child;
    }
    m->heap[at] = moved;
}

static void push(merge *m, entry added) {
    Py_ssize_t at = m->size++;
    while (at && before(&added, &m->heap[(at - 1) / 2])) {
        m->heap[at] = m->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    m->heap[at] = added;
}

static void pop(merge *m) {
    m->heap[0] = m->heap[--m->size];
    if (m->size) sink(m, 0);
}

/* A float that has a place among the others; else `foreign` is set. */
static inline double real(merge *m, PyObject *value) {
    if (!PyFloat_CheckExact(value)) {
        m->foreign = 1;
        return 0.0;
    }
    double number = PyFloat_AS_DOUBLE(value);
    if (number != number) m->foreign = 1;
    return number;
}

/* The first five of a tuple are a victim. */
static int parse(merge *m, PyObject *victim, Py_ssize_t source, entry *into) {
    if (!PyTuple_Check(victim) || PyTuple_GET_SIZE(victim) < 5) {
        PyErr_SetString(PyExc_TypeError, "a victim is a tuple of five");
        return -1;
    }
    into->level = PyLong_AsLong(PyTuple_GET_ITEM(victim, 0));
    into->score = real(m, PyTuple_GET_ITEM(victim, 1));
    into->active = real(m, PyTuple_GET_ITEM(victim, 2));
    into->number = PyLong_AsSsize_t(PyTuple_GET_ITEM(victim, 3));
    into->chunk = PyLong_AsSsize_t(PyTuple_GET_ITEM(victim, 4));
    into->source = source;
    return PyErr_Occurred() ? -1 : 0;
}

/* The next stretch of a node's chunks, from `chunk` on: 1, or 0 where there is none, or -1. */
static int refill(rest *r, PyObject *scores_of, PyObject *number, Py_ssize_t chunk) {
    PyObject *at = PyLong_FromSsize_t(chunk);
    PyObject *found = at ? PyObject_CallFunctionObjArgs(scores_of, number, at, NULL) : NULL;
    Py_XDECREF(at);
    if (!found) return -1;
    if (found == Py_None) {
        Py_DECREF(found);
        return 0;
    }
    PyObject *level, *active, *scores;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(found, "OOnO", &level, &active, &first, &scores)) {
        Py_DECREF(found);
        return -1;
    }
    PyObject *listed = PySequence_Fast(scores, "scores are a sequence");
    if (listed) {
        Py_INCREF(level);
        Py_XSETREF(r->level, level);
        Py_INCREF(active);
        Py_XSETREF(r->active, active);
        Py_INCREF(number);
        Py_XSETREF(r->number, number);
        Py_XSETREF(r->scores, listed);
        r->first = first;
        r->place = 0;
    }
    Py_DECREF(found);
    return listed ? (PySequence_Fast_GET_SIZE(listed) ? 1 : 0) : -1;
}

static void key_of(merge *m, const rest *r, entry *into) {
    into->level = PyLong_AsLong(r->level);
    into->score = real(m, PySequence_Fast_GET_ITEM(r->scores, r->place));
    into->active = real(m, r->active);
    into->number = PyLong_AsSsize_t(r->number);
    into->chunk = r->first + r->place;
}

static int append(PyObject *chosen, const rest *r) {
    PyObject *chunk = PyLong_FromSsize_t(r->first + r->place);
    PyObject *victim = chunk ? PyTuple_New(5) : NULL;
    if (!victim) {
        Py_XDECREF(chunk);
        return -1;
    }
    PyObject *score = PySequence_Fast_GET_ITEM(r->scores, r->place);
    PyObject *parts[5] = {r->level, score, r->active, r->number, chunk};
    for (int i = 0; i < 4; i++) Py_INCREF(parts[i]);
    for (int i = 0; i < 5; i++) PyTuple_SET_ITEM(victim, i, parts[i]);
    int failed = PyList_Append(chosen, victim);
    Py_DECREF(victim);
    return failed;
}

/* 0: done, -1: an error is set, or `foreign`. */
static int run(merge *m, PyObject *chosen, PyObject *heads, Py_ssize_t most, int whole, PyObject *scores_of) {
    int exhausted = 1;
    while (m->size && (PyList_GET_SIZE(chosen) < most || (whole && !exhausted))) {
        entry top = m->heap[0];
        Py_ssize_t which;
        if (top.source < 0) {
            which = ~top.source;
            pop(m);
        } else {
            PyObject *bucket = PyTuple_GET_ITEM(PyList_GET_ITEM(heads, top.source), 5);
            PyObject *following = PyIter_Next(bucket);
            if (following) {
                int failed = parse(m, following, top.source, &m->heap[0]);
                Py_DECREF(following);
                if (failed || m->foreign) return -1;
                sink(m, 0);
            } else {
                if (PyErr_Occurred()) return -1;
                pop(m);
            }
            if (m->count == m->room) { /* each bucket has one entry, each node one rest: both grow together */
                Py_ssize_t room = 2 * m->room + 16;
                rest *rests = PyMem_Realloc(m->rests, room * sizeof(rest));
                if (!rests) return PyErr_NoMemory(), -1;
                m->rests = rests;
                m->room = room;
                entry *heap = PyMem_Realloc(m->heap, (PyList_GET_SIZE(heads) + room) * sizeof(entry));
                if (!heap) return PyErr_NoMemory(), -1;
                m->heap = heap;
            }
            which = m->count++;
            memset(&m->rests[which], 0, sizeof(rest));
            PyObject *number = PyLong_FromSsize_t(top.number);
            if (!number) return -1;
            int filled = refill(&m->rests[which], scores_of, number, top.chunk);
            Py_DECREF(number);
            if (filled <= 0) {
                if (!filled) PyErr_SetString(PyExc_AssertionError, "a candidate has a chunk");
                return -1;
            }
            entry first = {0};
            first.source = ~which;
            key_of(m, &m->rests[which], &first);
            if (m->foreign) return -1;
            if (m->size && before(&m->heap[0], &first)) { /* the head had a lower score */
                push(m, first);
                continue;
            }
        }
        rest *r = &m->rests[which];
        entry next = {0};
        next.source = ~which;
        exhausted = 0;
        for (;;) {
            if (append(chosen, r)) return -1;
            r->place++;
            if (r->place == PySequence_Fast_GET_SIZE(r->scores)) {
                int filled = refill(r, scores_of, r->number, r->first + r->place);
                if (filled < 0) return -1;
                if (!filled) {
                    exhausted = 1;
                    break;
                }
            }
            key_of(m, r, &next);
            if (m->foreign) return -1;
            if (!whole && PyList_GET_SIZE(chosen) == most) break;
            if (m->size && before(&m->heap[0], &next)) break;
        }
        if (!exhausted) push(m, next);
    }
    return 0;
}

/* heads: the first entry of each bucket, (level, score, last active, number of the node, chunk, iterator over those behind it).
   scores_of(number of the node, chunk): (level, last active, first, scores) of the first run of its chunks from this one on, or
   None. Returns the list of victims, or None where something was no float. */
PyObject *choose(PyObject *heads, Py_ssize_t most, int whole, PyObject *scores_of) {
    if (!PyList_Check(heads)) {
        PyErr_SetString(PyExc_TypeError, "heads are a list");
        return NULL;
    }
    merge m = {0};
    Py_ssize_t buckets = PyList_GET_SIZE(heads);
    PyObject *chosen = PyList_New(0);
    int failed = chosen ? 0 : -1;
    m.heap = PyMem_Malloc((buckets + 1) * sizeof(entry));
    if (!failed && !m.heap) failed = (PyErr_NoMemory(), -1);
    for (Py_ssize_t i = 0; i < buckets && !failed; i++) {
        entry head;
        failed = parse(&m, PyList_GET_ITEM(heads, i), i, &head) || m.foreign ? -1 : 0;
        if (!failed) push(&m, head);
    }
    if (!failed) failed = run(&m, chosen, heads, most, whole, scores_of);
    for (Py_ssize_t i = 0; i < m.count; i++) {
        Py_XDECREF(m.rests[i].level);
        Py_XDECREF(m.rests[i].active);
        Py_XDECREF(m.rests[i].number);
        Py_XDECREF(m.rests[i].scores);
    }
    PyMem_Free(m.rests);
    PyMem_Free(m.heap);
    if (!failed) return chosen;
    Py_XDECREF(chosen);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* The chunks of a node in a choice, in the order in which they stand there. */
typedef struct {
    PyObject *number;
    Py_ssize_t *chunks;
    Py_ssize_t count, room;
} owned;

/* victims: a list. Returns a list of runs (number of the node, first chunk, stop), those of one node together. */
PyObject *spans(PyObject *victims) {
    if (!PyList_Check(victims)) {
        PyErr_SetString(PyExc_TypeError, "victims are a list");
        return NULL;
    }
    owned *owners = NULL;
    Py_ssize_t count = 0, room = 0, last = -1;
    PyObject *known = PyDict_New(), *found = PyList_New(0);
    int failed = !known || !found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(victims) && !failed; i++) {
        PyObject *victim = PyList_GET_ITEM(victims, i);
        PyObject *number = PyTuple_GET_ITEM(victim, 3);
        Py_ssize_t chunk = PyLong_AsSsize_t(PyTuple_GET_ITEM(victim, 4));
        if (last < 0 || owners[last].number != number) {
            PyObject *index = PyDict_GetItemWithError(known, number);
            if (index) {
                last = PyLong_AsSsize_t(index);
            } else {
                if (count == room) {
                    room = 2 * room + 8;
                    owned *more = PyMem_Realloc(owners, room * sizeof(owned));
                    if (!more) {
                        PyErr_NoMemory();
                        break;
                    }
                    owners = more;
                }
                last = count++;
                memset(&owners[last], 0, sizeof(owned));
                owners[last].number = number;
                index = PyLong_FromSsize_t(last);
                failed = !index || PyDict_SetItem(known, number, index);
                Py_XDECREF(index);
            }
        }
        owned *own = &owners[last];
        if (own->count == own->room) {
            own->room = 2 * own->room + 8;
            Py_ssize_t *more = PyMem_Realloc(own->chunks, own->room * sizeof(Py_ssize_t));
            if (!more) {
                PyErr_NoMemory();
                break;
            }
            own->chunks = more;
        }
        own->chunks[own->count++] = chunk;
    }
    failed = failed || PyErr_Occurred();
    for (Py_ssize_t i = 0; i < count; i++) {
        owned *own = &owners[i];
        for (Py_ssize_t start = 0, at = 1; at <= own->count && !failed; at++) {
            if (at < own->count && own->chunks[at] == own->chunks[at - 1] + 1) continue;
            PyObject *span = Py_BuildValue("(Onn)", own->number, own->chunks[start], own->chunks[at - 1] + 1);
            failed = !span || PyList_Append(found, span);
            Py_XDECREF(span);
            start = at;
        }
        PyMem_Free(own->chunks);
    }
    PyMem_Free(owners);
    Py_XDECREF(known);
    if (!failed) return found;
    Py_XDECREF(found);
    return NULL;
}
