/* Reads that fail: preloaded into a process and its children (LD_PRELOAD), it spoils reads of one file.
 *
 *   FAULTY_FILE   the end of the file's path
 *   FAULTY_AFTER  reads of that file, in a process, before the first that is spoiled
 *   FAULTY_DEED   EIO | short: half of what was asked for is read, rounded down to 4096 bytes | torn: 100 bytes fewer
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int is_spoiled(int file) {
    static _Atomic long num_reads;
    const char *name = getenv("FAULTY_FILE"), *after = getenv("FAULTY_AFTER");
    if (!name || !after) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    size_t of_name = strlen(name);
    if ((size_t)size < of_name || strcmp(path + size - of_name, name)) return 0;
    return num_reads++ >= atol(after);
}

static ssize_t read_some(int file, const struct iovec *parts, int count, off64_t start, int flags) {
    const char *deed = getenv("FAULTY_DEED");
    struct iovec part;
    if (count == 1 && deed && is_spoiled(file)) {
        part = parts[0];
        parts = &part;
        if (strcmp(deed, "EIO") == 0) {
            errno = EIO;
            return -1;
        }
        if (strcmp(deed, "short") == 0 && part.iov_len > 8192) part.iov_len = part.iov_len / 2 / 4096 * 4096;
        if (strcmp(deed, "torn") == 0 && start == 0) return syscall(SYS_preadv2, file, parts, 1, start, 0, flags) - 100;
    }
    return syscall(SYS_preadv2, file, parts, count, start, 0, flags);
}

ssize_t preadv2(int file, const struct iovec *parts, int count, off_t start, int flags) {
    return read_some(file, parts, count, start, flags);
}
ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t start, int flags) {
    return read_some(file, parts, count, start, flags);
}
ssize_t preadv(int file, const struct iovec *parts, int count, off_t start) {
    return read_some(file, parts, count, start, 0);
}
ssize_t preadv64(int file, const struct iovec *parts, int count, off64_t start) {
    return read_some(file, parts, count, start, 0);
}
