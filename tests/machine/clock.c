/* Shifts the date of a process by the number of seconds in the file DATE_OFFSET_FILE, which may
 * change while the process runs. Monotonic clocks stay as they are. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static long long offset(void) {
    const char *path = getenv("DATE_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    char text[32] = {0};
    if (file < 0) return 0;
    ssize_t len = read(file, text, sizeof text - 1);
    close(file);
    return len > 0 ? atoll(text) : 0;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (result == 0 && id == CLOCK_REALTIME) now->tv_sec += offset();
    return result;
}
