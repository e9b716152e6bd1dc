// Calls aarch64 functions that are in the memory of another process: driver PID. Reads calls from stdin, eight
// words each (address, arguments), and answers each with a byte. A page is copied when it is first touched; after
// the call, bytes that changed are written back, and only pages of code stay. Pages have the access that they have there.
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1 << 18, RANGES = 1 << 16, TEXT = 1 << 23, TAKEN = 3, FAULT = 4 };
static struct { uint64_t at; char *before; int code; } pages[PAGES];  // a hash table
static uint32_t touched[PAGES];                                       // its entries in use
static struct { uint64_t begin, end; char access[4]; } ranges[RANGES];
static char text[TEXT];
static int used, count, memory, maps;

static void stop(int status, const char *why, uint64_t at) {
  fprintf(stderr, "%s at %#lx\n", why, at);
  _exit(status);
}

// What LLVM calls; printed as addresses for the linker.
static void *set(void *to, int value, size_t n) { return memset(to, value, n); }
static void *copy(void *to, const void *from, size_t n) { return memcpy(to, from, n); }
static void *move(void *to, const void *from, size_t n) { return memmove(to, from, n); }

static void read_ranges(void) {
  long size = 0;
  lseek(maps, 0, SEEK_SET);
  for (long n; (n = read(maps, text + size, TEXT - 1 - size)) > 0; size += n) {}
  text[size] = count = 0;
  for (char *line = text; *line && count < RANGES; line = strchr(line, '\n') + 1, count++) {
    ranges[count].begin = strtoull(line, &line, 16);
    ranges[count].end = strtoull(line + 1, &line, 16);
    memcpy(ranges[count].access, line + 1, 4);
  }
}

static const char *access_of(uint64_t at) {
  int low = 0, high = count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (ranges[middle].end <= at) low = middle + 1; else high = middle;
  }
  return low < count && ranges[low].begin <= at ? ranges[low].access : "---";
}

static int slot_of(uint64_t at) {
  uint32_t k = at / PAGE * 2654435761u % PAGES;
  while (pages[k].at && pages[k].at != at) k = (k + 1) % PAGES;
  return k;
}

static void touch(int number, siginfo_t *info, void *context) {
  uint64_t at = (uint64_t)info->si_addr & -PAGE;
  char *page = (char *)at;
  int k = slot_of(at);
  if (!count) read_ranges();
  const char *access = access_of(at);
  if (!pages[k].at) {
    if (access[0] != 'r') read_ranges(), access = access_of(at);  // it may have come while they were read
    if (access[0] != 'r') stop(FAULT, "no access", (uint64_t)info->si_addr);
    if (used > PAGES / 2) stop(FAULT, "too many pages", at);
    if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != page) stop(TAKEN, "taken", at);
    if (pread(memory, page, PAGE, at) != PAGE) stop(FAULT, "no memory", (uint64_t)info->si_addr);
    pages[k].at = at;
    pages[k].code = access[2] == 'x';
    touched[used++] = k;
    mprotect(page, PAGE, pages[k].code ? PROT_READ | PROT_EXEC : PROT_READ);
  } else if (!pages[k].before && access[1] == 'w') {
    pages[k].before = memcpy(malloc(PAGE), page, PAGE);
    mprotect(page, PAGE, PROT_READ | PROT_WRITE);
  } else stop(FAULT, pages[k].before ? "no access to a page that is there" : "no access to write", (uint64_t)info->si_addr);
}

static void write_back(char *page, char *before) {
  for (int i = 0, n; i < PAGE; i += n) {  // only what changed: other threads of the process go on
    int differs = page[i] != before[i];
    for (n = 1; i + n < PAGE && (page[i + n] != before[i + n]) == differs; n++) {}
    if (differs && pwrite(memory, page + i, n, (uint64_t)page + i) != n) stop(FAULT, "no write", (uint64_t)page);
  }
}

static void forget_pages(void) {
  static uint64_t code[PAGES];
  int stay = 0;
  for (int i = 0; i < used; i++) {
    uint32_t k = touched[i];
    char *page = (char *)pages[k].at;
    if (pages[k].before) write_back(page, pages[k].before);
    free(pages[k].before);
    if (pages[k].code) code[stay++] = pages[k].at; else munmap(page, PAGE);
    memset(&pages[k], 0, sizeof pages[k]);
  }
  for (used = 0; used < stay; used++) {
    uint32_t k = touched[used] = slot_of(code[used]);
    pages[k].at = code[used];
    pages[k].code = 1;
  }
}

int main(int words, char **texts) {
  char path[64];
  uint64_t a[8];
  snprintf(path, sizeof path, "/proc/%s/mem", texts[1]);
  memory = open(path, O_RDWR);
  snprintf(path, sizeof path, "/proc/%s/maps", texts[1]);
  maps = open(path, O_RDONLY);
  if (memory < 0 || maps < 0) stop(FAULT, "no process", 0);
  struct sigaction action = {.sa_sigaction = touch, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, 0);
  sigaction(SIGBUS, &action, 0);
  a[0] = (uint64_t)set, a[1] = (uint64_t)copy, a[2] = (uint64_t)move;
  write(1, a, 24);
  while (read(0, a, sizeof a) == sizeof a) {
    count = 0;
    ((void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))a[0])(
        a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    forget_pages();
    write(1, "", 1);
  }
}
