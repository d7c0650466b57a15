// Faults in the calls that write below one folder: preloaded (LD_PRELOAD), it counts these calls in all threads, and
// at the one it was armed for kills the process, or answers with an error in the file system's place.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static atomic_long calls;
static long first = LONG_MAX, last = LONG_MAX;
static int failure;  // an errno; 0 kills

// From here on, calls `nth` to `nth + times - 1` that write below `below` (an absolute path) fail with `error`.
void fault_arm(const char *below, long nth, long times, int error) {
    strncpy(folder, below, sizeof folder - 1);
    first = nth, last = nth > LONG_MAX - times ? LONG_MAX : nth + times - 1, failure = error;
    atomic_store(&calls, 0);
}

long fault_calls(void) { return atomic_load(&calls); }

static int below_folder(int directory, const char *path) {
    if (!folder[0]) return 0;
    char where[PATH_MAX] = "", link[64];
    if (!path || path[0] != '/') {
        snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, where, sizeof where - 1);
        if (length < 0) return 0;
        where[length] = 0;
    }
    if (path) {
        size_t used = strlen(where);
        snprintf(where + used, sizeof where - used, "%s%s", used ? "/" : "", path);
    }
    return !strncmp(where, folder, strlen(folder));
}

// Whether this call is to fail: errno says how. Kills where that is what was armed.
static int fails(int directory, const char *path) {
    if (!below_folder(directory, path)) return 0;
    long call = atomic_fetch_add(&calls, 1) + 1;
    if (call < first || call > last) return 0;
    if (!failure) kill(getpid(), SIGKILL);
    errno = failure;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & O_CREAT) {                                                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode = va_arg(rest, mode_t);                                                                                   \
        va_end(rest);                                                                                                  \
    }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return WRITES(flags) && fails(AT_FDCWD, path) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags)
    return WRITES(flags) && fails(AT_FDCWD, path) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
    MODE(flags)
    return WRITES(flags) && fails(directory, path) ? -1 : REAL(openat)(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags)
    return WRITES(flags) && fails(directory, path) ? -1 : REAL(openat64)(directory, path, flags, mode);
}

// A process that is killed has written half of what it wanted to.
ssize_t write(int file, const void *data, size_t size) {
    if (below_folder(file, NULL) && !failure && atomic_load(&calls) + 1 == first) REAL(write)(file, data, size / 2);
    return fails(file, NULL) ? -1 : REAL(write)(file, data, size);
}

#define FAULTY(type, name, parameters, directory, path, arguments)                                                     \
    type name parameters { return fails(directory, path) ? -1 : REAL(name) arguments; }

FAULTY(ssize_t, writev, (int file, const struct iovec *data, int n), file, NULL, (file, data, n))
FAULTY(ssize_t, pwrite, (int file, const void *data, size_t n, off_t at), file, NULL, (file, data, n, at))
FAULTY(ssize_t, pwrite64, (int file, const void *data, size_t n, off64_t at), file, NULL, (file, data, n, at))
FAULTY(ssize_t, sendfile, (int to, int from, off_t *at, size_t n), to, NULL, (to, from, at, n))
FAULTY(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t n), to, NULL, (to, from, at, n))
FAULTY(int, ftruncate, (int file, off_t size), file, NULL, (file, size))
FAULTY(int, ftruncate64, (int file, off64_t size), file, NULL, (file, size))
FAULTY(int, fsync, (int file), file, NULL, (file))
FAULTY(int, fdatasync, (int file), file, NULL, (file))
FAULTY(int, rename, (const char *from, const char *to), AT_FDCWD, to, (from, to))
FAULTY(int, renameat, (int a, const char *from, int b, const char *to), b, to, (a, from, b, to))
FAULTY(int, link, (const char *from, const char *to), AT_FDCWD, to, (from, to))
FAULTY(int, symlink, (const char *from, const char *to), AT_FDCWD, to, (from, to))
FAULTY(int, mkdir, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
FAULTY(int, rmdir, (const char *path), AT_FDCWD, path, (path))
FAULTY(int, unlink, (const char *path), AT_FDCWD, path, (path))
FAULTY(int, unlinkat, (int directory, const char *path, int flags), directory, path, (directory, path, flags))
