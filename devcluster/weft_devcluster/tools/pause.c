/* The first process of a pod's sandbox and of a node's process namespace: it does nothing, and buries the dead. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal) { _exit(0); }

static void bury(int signal) {
    while (waitpid(-1, 0, WNOHANG) > 0) {
    }
}

int main(void) {
    signal(SIGTERM, end);
    signal(SIGINT, end);
    signal(SIGCHLD, bury);
    for (;;) pause();
}
