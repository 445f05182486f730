// Preloaded into a process: its files below a folder fail, and its clock is off, as a control file says now.
//
// The control file, whose path is in WEFT_BENCH_HOST_FAULTS, has the seconds by which CLOCK_REALTIME is off (8 bytes),
// the letter of the disk's fault, and the folder, ended by a zero byte:
//   E  reading, writing and syncing are EIO
//   F  there is no byte left: writing, making and growing are ENOSPC
//   R  read-only: writing, making, renaming and removing are EROFS
// Any other letter: nothing fails. The monotonic clock goes on as it is. (libfaketime 0.9.10 does not: with
// FAKETIME_DONT_FAKE_MONOTONIC Python's time.sleep is EINVAL.)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define CONTROL_BYTES 4096
static volatile const struct {
    int64_t clock_s;
    char fault;
    char folder[CONTROL_BYTES - 9];
} *control;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("WEFT_BENCH_HOST_FAULTS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *mapped = mmap(NULL, CONTROL_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) control = mapped;
}

static int below(const char *path) {
    const char *folder = (const char *)control->folder;
    size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int is_struck_fd(int fd, const char *faults) {
    if (!control || !control->fault || !strchr(faults, control->fault)) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int is_struck_at(int dir, const char *name, const char *faults) {
    if (!control || !control->fault || !strchr(faults, control->fault)) return 0;
    if (name[0] == '/') return below(name);
    char link[64], path[8192];
    snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
    ssize_t length = readlink(link, path, 4095);
    if (length < 0) return 0;
    snprintf(path + length, sizeof path - length, "/%s", name);
    return below(path);
}

static int failed(void) {
    errno = control->fault == 'F' ? ENOSPC : control->fault == 'R' ? EROFS : EIO;
    return -1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FD(type, name, faults, declared, ...)                 \
    type name declared {                                         \
        static __typeof__(&name) real;                           \
        if (!real) real = REAL(name);                            \
        if (is_struck_fd(fd, faults)) return (type)failed();     \
        return real(__VA_ARGS__);                                \
    }
#define ON_PATH(name, faults, declared, dir, path, ...)          \
    int name declared {                                          \
        static __typeof__(&name) real;                           \
        if (!real) real = REAL(name);                            \
        if (is_struck_at(dir, path, faults)) return failed();    \
        return real(__VA_ARGS__);                                \
    }
#define ON_OPEN(name, declared, dir, ...)                                                     \
    int name declared {                                                                       \
        static __typeof__(&name) real;                                                        \
        if (!real) real = REAL(name);                                                         \
        va_list rest;                                                                         \
        va_start(rest, flags);                                                                \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;               \
        va_end(rest);                                                                         \
        int makes = flags & O_CREAT, writes = (flags & O_ACCMODE) != O_RDONLY;                \
        if ((makes && faccessat(dir, path, F_OK, 0) && is_struck_at(dir, path, "F")) ||       \
            ((makes || writes) && is_struck_at(dir, path, "R")))                              \
            return failed();                                                                  \
        return real(__VA_ARGS__);                                                             \
    }

ON_FD(ssize_t, read, "E", (int fd, void *to, size_t size), fd, to, size)
ON_FD(ssize_t, pread, "E", (int fd, void *to, size_t size, off_t at), fd, to, size, at)
ON_FD(ssize_t, pread64, "E", (int fd, void *to, size_t size, off64_t at), fd, to, size, at)
ON_FD(ssize_t, readv, "E", (int fd, const struct iovec *to, int count), fd, to, count)
ON_FD(ssize_t, write, "EFR", (int fd, const void *from, size_t size), fd, from, size)
ON_FD(ssize_t, pwrite, "EFR", (int fd, const void *from, size_t size, off_t at), fd, from, size, at)
ON_FD(ssize_t, pwrite64, "EFR", (int fd, const void *from, size_t size, off64_t at), fd, from, size, at)
ON_FD(ssize_t, writev, "EFR", (int fd, const struct iovec *from, int count), fd, from, count)
ON_FD(int, fsync, "E", (int fd), fd)
ON_FD(int, fdatasync, "E", (int fd), fd)
ON_FD(int, ftruncate, "R", (int fd, off_t size), fd, size)
ON_FD(int, ftruncate64, "R", (int fd, off64_t size), fd, size)
ON_OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, flags, mode)
ON_OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, flags, mode)
ON_OPEN(openat, (int dir, const char *path, int flags, ...), dir, dir, path, flags, mode)
ON_OPEN(openat64, (int dir, const char *path, int flags, ...), dir, dir, path, flags, mode)
ON_PATH(mkdir, "FR", (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
ON_PATH(mkdirat, "FR", (int dir, const char *path, mode_t mode), dir, path, dir, path, mode)
ON_PATH(link, "FR", (const char *from, const char *to), AT_FDCWD, to, from, to)

// Nothing has to be free for these: they fail where the file system is read-only alone.
ON_PATH(rename, "R", (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(renameat, "R", (int dir, const char *from, int other, const char *to), other, to, dir, from, other, to)
ON_PATH(unlink, "R", (const char *path), AT_FDCWD, path, path)
ON_PATH(unlinkat, "R", (int dir, const char *path, int flags), dir, path, dir, path, flags)
ON_PATH(rmdir, "R", (const char *path), AT_FDCWD, path, path)

#define MONOTONIC_MOST_S 1000000000  // a deadline beyond it is one of the wall clock

static int64_t off_by(void) { return control ? control->clock_s : 0; }

int clock_gettime(clockid_t clock, struct timespec *at) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += off_by();
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(at, zone);
    if (!result) at->tv_sec += off_by();
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

// A deadline on the clock that is off is one for the kernel, whose clock is right.
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = REAL(pthread_cond_timedwait);
    struct timespec right = *until;
    if (right.tv_sec > MONOTONIC_MOST_S) right.tv_sec -= off_by();
    return real(cond, mutex, &right);
}
