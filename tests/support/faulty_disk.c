/* A disk that fails: preloaded into a process and its children (LD_PRELOAD), it counts what they do to files below one
 * folder and, at one of these operations, kills the process, kills all of them, or fails.
 *
 *   FAULTY_ROOT     the folder
 *   FAULTY_COUNT    a file of 8 bytes, shared by all processes: operations so far
 *   FAULTY_AT       the operation at which it happens, from 1; 0: never
 *   FAULTY_DEED     kill | cut | EIO | ENOSPC
 *   FAULTY_JOURNAL  a file: one line per operation that was done, with what is needed to undo it (see faulty_disk.py)
 *   FAULTY_KEPT     a folder for what was replaced or deleted
 *
 * System calls are made directly where the library call would come back here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static _Atomic uint64_t *counter;
static char root[PATH_MAX], kept[PATH_MAX];
static long at;
static const char *deed;
static int journal = -1;

__attribute__((constructor)) static void start(void) {
    const char *folder = getenv("FAULTY_ROOT"), *count = getenv("FAULTY_COUNT");
    if (!folder || !count) return;
    int file = (int)syscall(SYS_openat, AT_FDCWD, count, O_RDWR | O_CLOEXEC, 0);
    void *shared = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) return;
    snprintf(root, sizeof root, "%s", folder);
    snprintf(kept, sizeof kept, "%s", getenv("FAULTY_KEPT"));
    deed = getenv("FAULTY_DEED");
    at = atol(getenv("FAULTY_AT"));
    journal = (int)syscall(SYS_openat, AT_FDCWD, getenv("FAULTY_JOURNAL"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    counter = shared;
}

static int is_ours(const char *path) {
    size_t size = strlen(root);
    return counter && strncmp(path, root, size) == 0 && (path[size] == '/' || path[size] == 0);
}

/* The absolute path of a name below a folder that is open; 0 when it is not below the root. */
static int below(int folder, const char *name, char *path) {
    if (!counter || !name) return 0;
    char base[PATH_MAX] = "";
    if (name[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t size = readlink(link, base, sizeof base - 1);
            if (size < 0) return 0;
            base[size] = 0;
        }
    }
    if (snprintf(path, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", name) >= PATH_MAX) return 0;
    return is_ours(path);
}

static int open_below(int file, char *path) {
    if (!counter || file < 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_ours(path);
}

/* Counts an operation; what is to happen at this one happens. Nonzero: the caller fails with errno. */
static int count(void) {
    uint64_t number = ++*counter;
    if (!at || number < (uint64_t)at) return 0;
    if (strcmp(deed, "ENOSPC") == 0) { errno = ENOSPC; return 1; } /* a full disk stays full */
    if (number != (uint64_t)at) return 0;
    if (strcmp(deed, "EIO") == 0) { errno = EIO; return 1; }
    kill(strcmp(deed, "cut") == 0 ? 0 : getpid(), SIGKILL);
    for (;;) pause();
}

static void note(const char *what, const char *first, const char *second) {
    char line[3 * PATH_MAX];
    int size = snprintf(line, sizeof line, "%s\t%s\t%s\n", what, first, second ? second : "");
    syscall(SYS_write, journal, line, (size_t)size);
}

/* Keeps what has this name under another one, which is returned; "" when there is nothing. */
static const char *keep(const char *path, char *copy) {
    static _Atomic uint64_t number;
    snprintf(copy, PATH_MAX, "%.3000s/%d-%lu", kept, getpid(), (unsigned long)++number);
    return syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, copy, 0) == 0 ? copy : "";
}

static int opened(const char *path, int flags, int existed, int file) {
    if (file >= 0 && !existed && (flags & O_CREAT)) note("create", path, NULL);
    if (file >= 0 && existed && (flags & O_TRUNC)) note("write", path, NULL);
    return file;
}

#define OPEN(name)                                                                  \
    int name(const char *given, int flags, ...) {                                   \
        REAL(name);                                                                 \
        va_list rest; va_start(rest, flags);                                        \
        mode_t mode = va_arg(rest, mode_t); va_end(rest);                           \
        char path[PATH_MAX];                                                        \
        if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !below(AT_FDCWD, given, path)) \
            return real(given, flags, mode);                                        \
        int existed = access(path, F_OK) == 0;                                      \
        if (count()) return -1;                                                     \
        return opened(path, flags, existed, real(given, flags, mode));              \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                \
    int name(int folder, const char *given, int flags, ...) {                       \
        REAL(name);                                                                 \
        va_list rest; va_start(rest, flags);                                        \
        mode_t mode = va_arg(rest, mode_t); va_end(rest);                           \
        char path[PATH_MAX];                                                        \
        if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !below(folder, given, path)) \
            return real(folder, given, flags, mode);                                \
        int existed = access(path, F_OK) == 0;                                      \
        if (count()) return -1;                                                     \
        return opened(path, flags, existed, real(folder, given, flags, mode));      \
    }
OPENAT(openat)
OPENAT(openat64)

#define WRITE(type, name, parameters, arguments)                                    \
    type name parameters {                                                          \
        REAL(name);                                                                 \
        char path[PATH_MAX];                                                        \
        if (!open_below(file, path)) return real arguments;                         \
        if (count()) return -1;                                                     \
        note("write", path, NULL);                                                  \
        return real arguments;                                                      \
    }
WRITE(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
WRITE(ssize_t, pwrite, (int file, const void *data, size_t size, off_t place), (file, data, size, place))
WRITE(ssize_t, pwrite64, (int file, const void *data, size_t size, off64_t place), (file, data, size, place))
WRITE(ssize_t, writev, (int file, const struct iovec *parts, int number), (file, parts, number))
WRITE(int, ftruncate, (int file, off_t size), (file, size))
WRITE(int, ftruncate64, (int file, off64_t size), (file, size))

#define SYNC(name)                                                                  \
    int name(int file) {                                                            \
        REAL(name);                                                                 \
        char path[PATH_MAX], size[32] = "";                                         \
        if (!open_below(file, path)) return real(file);                             \
        if (count()) return -1;                                                     \
        struct stat status;                                                         \
        if (fstat(file, &status) == 0) snprintf(size, sizeof size, "%ld", (long)status.st_size); \
        int ended = real(file);                                                     \
        if (ended == 0) note(S_ISDIR(status.st_mode) ? "sync folder" : "sync", path, size); \
        return ended;                                                               \
    }
SYNC(fsync)
SYNC(fdatasync)

static int renamed(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX], copy[PATH_MAX], both[2 * PATH_MAX + 1];
    int ours = below(to_folder, to, target) && below(from_folder, from, source);
    if (ours && count()) return -1;
    const char *old = ours ? keep(target, copy) : "";
    int ended = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    if (ours && ended == 0) {
        snprintf(both, sizeof both, "%s\t%s", target, old);
        note("rename", source, both);
    }
    return ended;
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return renamed(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return renamed(a, from, b, to, flags); }

static int linked(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    char target[PATH_MAX];
    int ours = below(to_folder, to, target);
    if (ours && count()) return -1;
    int ended = (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
    if (ours && ended == 0) note("create", target, NULL);
    return ended;
}
int link(const char *from, const char *to) { return linked(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return linked(a, from, b, to, flags); }

static int removed(int folder, const char *name, int flags) {
    char path[PATH_MAX], copy[PATH_MAX];
    int ours = below(folder, name, path);
    if (ours && count()) return -1;
    const char *old = ours && !(flags & AT_REMOVEDIR) ? keep(path, copy) : "";
    int ended = (int)syscall(SYS_unlinkat, folder, name, flags);
    if (ours && ended == 0) note(flags & AT_REMOVEDIR ? "remove folder" : "remove", path, old);
    return ended;
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    int ours = below(folder, name, path);
    if (ours && count()) return -1;
    int ended = (int)syscall(SYS_mkdirat, folder, name, mode);
    if (ours && ended == 0) note("create", path, NULL);
    return ended;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
