// What a processor, its memory, its disk and its sockets take, without Python in between.
//
//   chase             loads that each need the one before: the latency of a cache or of memory
//   stream            all of an array, one after the other, by several threads: bandwidth
//   arithmetic        multiply-adds in registers: the rate of the vector units
//   read_blocks       blocks of a file at random places, by several threads: latency, rate
//   read_file, write_file   a whole file, in large blocks
//   hand_over         a word, and a buffer, from one core to another
//   ping, answer      bytes over a connected socket, and the other side of it
//
// kernels.py compiles this for the processor at hand and calls it. Each function measures itself by
// the steady clock; none of them prints. What is computed goes to `sink`, so that it is computed.

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64;         // bytes that a cache holds as one
constexpr size_t kHuge = 2u << 20;   // bytes of a huge page
constexpr size_t kWarmed = 64u << 20;  // larger rings are not gone through before they are timed
constexpr size_t kPage = 4096;       // what O_DIRECT wants buffers aligned to

volatile uint64_t sink;

double now_s() {
  using std::chrono::duration;
  using std::chrono::steady_clock;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

struct Random {  // xorshift64*: Marsaglia 2003, Vigna 2016
  uint64_t state;
  uint64_t next() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 2685821657736338717ull;
  }
};

// Memory of our own, in huge pages where the system gives some, else in small ones.
struct Memory {
  void *base;
  size_t length;
  char *data;
  Memory(size_t bytes, bool is_huge) : length(bytes + kHuge) {
    base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) { base = nullptr, data = nullptr; return; }
    data = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(base) + kHuge - 1) & ~(kHuge - 1));
#if defined(MADV_HUGEPAGE)
    madvise(data, bytes, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  }
  ~Memory() { if (base) munmap(base, length); }
};

// One ring through all lines of [data, data + bytes), in an order that no prefetcher guesses:
// a random permutation that is a single cycle (Sattolo 1986).
void make_ring(char *data, size_t bytes, Random &random) {
  size_t count = bytes / kLine;
  std::vector<uint32_t> next(count);
  for (size_t i = 0; i < count; ++i) next[i] = i;
  for (size_t i = count - 1; i > 0; --i) std::swap(next[i], next[random.next() % i]);
  for (size_t i = 0; i < count; ++i)
    *reinterpret_cast<void **>(data + i * kLine) = data + size_t(next[i]) * kLine;
}

// Goes on where the last walk has ended: who begins anew finds what it has just met in a cache.
template <int K>
double walk(void ***places, size_t steps) {
  void **at[K];
  for (int i = 0; i < K; ++i) at[i] = places[i];
  double start_s = now_s();
  for (size_t step = 0; step < steps; ++step)
    for (int i = 0; i < K; ++i) at[i] = static_cast<void **>(*at[i]);
  double took_s = now_s() - start_s;
  for (int i = 0; i < K; ++i) places[i] = at[i];
  sink = sink + reinterpret_cast<uintptr_t>(at[0]);
  return took_s;
}

double walk_rings(int rings, void ***places, size_t steps) {
  switch (rings) {
    case 1: return walk<1>(places, steps);
    case 2: return walk<2>(places, steps);
    case 4: return walk<4>(places, steps);
    case 8: return walk<8>(places, steps);
    default: return walk<16>(places, steps);
  }
}

// Several threads that begin together; seconds from then until the last has ended.
double together(int threads, const std::function<void(int)> &work) {
  std::atomic<int> waiting{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([&, i] {
      ++waiting;
      while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
      work(i);
    });
  while (waiting < threads) std::this_thread::yield();
  double start_s = now_s();
  go.store(true, std::memory_order_release);
  for (auto &one : all) one.join();
  return now_s() - start_s;
}

void keep_to(int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
#endif
}

#if defined(__AVX512F__)
constexpr int kVector = 64;
#elif defined(__AVX__)
constexpr int kVector = 32;
#else
constexpr int kVector = 16;
#endif
constexpr int kChains = 16;  // independent sums: more than units times cycles of one multiply-add

template <class T>
double multiply_add(long rounds) {
  typedef T V __attribute__((vector_size(kVector)));
  V sum[kChains], factor, addend;
  for (size_t j = 0; j < kVector / sizeof(T); ++j) {
    factor[j] = T(0.999), addend[j] = T(0.001);
    for (int i = 0; i < kChains; ++i) sum[i][j] = T(i + 1);
  }
  for (long round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = sum[i] * factor + addend;
  for (int i = 0; i < kChains; ++i) sink = sink + uint64_t(sum[i][0]);
  return 2.0 * kChains * (kVector / sizeof(T)) * rounds;
}

#if defined(__AVX512BF16__)
double multiply_add_bf16(long rounds) {
  __m512 sum[kChains];
  __m512bh one = (__m512bh)_mm512_set1_epi32(0x3c003c00);
  for (auto &s : sum) s = _mm512_set1_ps(1.0f);
  for (long round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], one, one);
  for (auto &s : sum) sink = sink + uint64_t(_mm512_cvtss_f32(s));
  return 2.0 * kChains * 32 * rounds;
}
#endif
#if defined(__AVX512FP16__)
double multiply_add_fp16(long rounds) {
  __m512h sum[kChains], factor = _mm512_set1_ph(_Float16(0.99)), addend = factor;
  for (auto &s : sum) s = addend;
  for (long round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_fmadd_ph(sum[i], factor, addend);
  for (auto &s : sum) sink = sink + uint64_t(float(_mm512_cvtsh_h(s)));
  return 2.0 * kChains * 32 * rounds;
}
#endif
#if defined(__AVX512VNNI__)
double multiply_add_int8(long rounds) {
  __m512i sum[kChains], one = _mm512_set1_epi8(1);
  for (auto &s : sum) s = _mm512_setzero_si512();
  for (long round = 0; round < rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], one, one);
  for (auto &s : sum) sink = sink + uint64_t(_mm512_cvtsi512_si32(s));
  return 2.0 * kChains * 64 * rounds;
}
#endif

bool send_all(int fd, const char *data, size_t bytes) {
  while (bytes > 0) {
    ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent, bytes -= sent;
  }
  return true;
}

bool receive_all(int fd, char *data, size_t bytes) {
  while (bytes > 0) {
    ssize_t got = recv(fd, data, bytes, 0);
    if (got <= 0) return false;
    data += got, bytes -= got;
  }
  return true;
}

constexpr size_t kChunk = 1u << 20;

}  // namespace

extern "C" {

// Seconds a load, once for each repeat. Several rings at once share `bytes`: their loads do not
// wait for each other, and the seconds are of one load of all of them. 0: done, 1: no memory.
int chase(size_t bytes, size_t steps, int rings, int is_huge, int repeats, double *seconds) {
  size_t each = bytes / rings / kLine * kLine;
  Memory memory(each * rings, is_huge);
  if (!memory.data || each < 2 * kLine) return 1;
  Random random{88172645463325252ull};
  void **places[16];
  for (int i = 0; i < rings; ++i) {
    make_ring(memory.data + i * each, each, random);
    places[i] = reinterpret_cast<void **>(memory.data + i * each);
  }
  // Caches hold what they can: all of a small ring, and of a large one what was met last.
  walk_rings(rings, places, bytes <= kWarmed ? 2 * each / kLine : std::min(steps, each / kLine));
  for (int i = 0; i < repeats; ++i)
    seconds[i] = walk_rings(rings, places, steps) / (double(steps) * rings);
  return 0;
}

// Seconds of going over arrays of `bytes` once, for each repeat. What: 0 read one, 1 copy one to
// another, 2 a = b + 3 c (STREAM's triad, McCalpin 1995). Each thread has its own part, and has
// touched it first. 0: done, 1: no memory.
int stream(int what, size_t bytes, int threads, int repeats, double *seconds) {
  size_t count = bytes / sizeof(double) / threads / 8 * 8;
  Memory a(bytes, true), b(bytes, true), c(bytes, true);
  if (!a.data || !b.data || !c.data) return 1;
  auto part = [&](Memory &m, int i) { return reinterpret_cast<double *>(m.data) + i * count; };
  together(threads, [&](int i) {
    for (size_t j = 0; j < count; ++j) part(a, i)[j] = 1, part(b, i)[j] = 2, part(c, i)[j] = 3;
  });
  for (int repeat = 0; repeat < repeats; ++repeat)
    seconds[repeat] = together(threads, [&](int i) {
      double *__restrict__ x = part(a, i);
      const double *__restrict__ y = part(b, i), *__restrict__ z = part(c, i);
      if (what == 0) {
        const uint64_t *words = reinterpret_cast<const uint64_t *>(y);
        uint64_t sum[8] = {};
        for (size_t j = 0; j < count; j += 8)
          for (int k = 0; k < 8; ++k) sum[k] += words[j + k];
        uint64_t all = 0;
        for (uint64_t one : sum) all += one;
        sink = sink + all;
      } else if (what == 1) {
        for (size_t j = 0; j < count; ++j) x[j] = y[j];
      } else {
        for (size_t j = 0; j < count; ++j) x[j] = y[j] + 3.0 * z[j];
      }
      sink = sink + uint64_t(x[count / 2]);
    });
  return 0;
}

// Operations a second of all threads together, for each repeat. Format: 0 fp32, 1 fp64, 2 bf16,
// 3 fp16, 4 int8. 0: done, 1: this processor has no such instruction.
int arithmetic(int format, long rounds, int threads, int repeats, double *per_second) {
  std::function<double(long)> kernel;
  if (format == 0) kernel = multiply_add<float>;
  if (format == 1) kernel = multiply_add<double>;
#if defined(__AVX512BF16__)
  if (format == 2) kernel = multiply_add_bf16;
#endif
#if defined(__AVX512FP16__)
  if (format == 3) kernel = multiply_add_fp16;
#endif
#if defined(__AVX512VNNI__)
  if (format == 4) kernel = multiply_add_int8;
#endif
  if (!kernel) return 1;
  for (int i = 0; i < repeats; ++i) {
    std::atomic<long> done{0};
    double took_s = together(threads, [&](int) { done += long(kernel(rounds) / rounds); });
    per_second[i] = double(done) * rounds / took_s;
  }
  return 0;
}

int vector_bits() { return kVector * 8; }

// Blocks at random places until `seconds` are over. Returns how many were read, less than 0 where
// reading failed; `took_s` is how long that took, `each_s` the seconds of the first thread's, of
// which there are at most `most_each`, `num_each` how many.
long read_blocks(int fd, size_t file_bytes, size_t block, int threads, double seconds,
                 double *took_s, double *each_s, long most_each, long *num_each) {
  std::atomic<long> count{0};
  std::atomic<bool> has_failed{false};
  *num_each = 0;
  *took_s = together(threads, [&](int i) {
    char *buffer = static_cast<char *>(std::aligned_alloc(kPage, block));
    Random random{0x9e3779b97f4a7c15ull + 7919ull * uint64_t(i)};
    double begin_s = now_s(), before_s = begin_s;
    while (before_s < begin_s + seconds) {
      off_t place = off_t(random.next() % (file_bytes / block) * block);
      if (pread(fd, buffer, block, place) != ssize_t(block)) { has_failed = true; break; }
      double after_s = now_s();
      if (i == 0 && *num_each < most_each) each_s[(*num_each)++] = after_s - before_s;
      before_s = after_s;
      ++count;
    }
    std::free(buffer);
  });
  return has_failed ? -1 : count.load();
}

// Seconds of reading a whole file by threads that share it, or of writing it (with fdatasync); less
// than 0: it failed.
double read_file(int fd, size_t file_bytes, size_t block, int threads) {
  std::atomic<size_t> next{0};
  std::atomic<bool> has_failed{false};
  double took_s = together(threads, [&](int) {
    char *buffer = static_cast<char *>(std::aligned_alloc(kPage, block));
    for (size_t place; (place = next.fetch_add(block)) + block <= file_bytes;)
      if (pread(fd, buffer, block, off_t(place)) != ssize_t(block)) { has_failed = true; break; }
    std::free(buffer);
  });
  return has_failed ? -1.0 : took_s;
}

double write_file(int fd, size_t file_bytes, size_t block) {
  char *buffer = static_cast<char *>(std::aligned_alloc(kPage, block));
  Random random{20261125};  // a disk that compresses is not to be flattered
  for (size_t i = 0; i < block / 8; ++i) reinterpret_cast<uint64_t *>(buffer)[i] = random.next();
  double start_s = now_s();
  bool is_good = true;
  for (size_t place = 0; is_good && place + block <= file_bytes; place += block) {
    *reinterpret_cast<uint64_t *>(buffer) = random.next();
    is_good = pwrite(fd, buffer, block, off_t(place)) == ssize_t(block);
  }
#if defined(__linux__)
  is_good = is_good && fdatasync(fd) == 0;
#else
  is_good = is_good && fsync(fd) == 0;
#endif
  std::free(buffer);
  return is_good ? now_s() - start_s : -1.0;
}

// From one core to another, the seconds of one way of a word, for each repeat, and of a buffer that
// the one has just written and the other copies. 0: done, 1: no memory.
int hand_over(int one, int other, size_t bytes, long words, int repeats, double *word_s,
              double *buffer_s) {
  struct alignas(128) Word { std::atomic<long> value{0}; } there, back;
  Memory shared(bytes, true), own(bytes, true);
  if (!shared.data || !own.data) return 1;
  std::memset(own.data, 1, bytes);
  std::thread answers([&] {
    keep_to(other);
    for (long number = 1; number <= words * repeats; ++number) {
      while (there.value.load(std::memory_order_acquire) < number) {}
      back.value.store(number, std::memory_order_release);
    }
    for (long number = words * repeats + 1; number <= words * repeats + repeats; ++number) {
      while (there.value.load(std::memory_order_acquire) < number) {}
      double start_s = now_s();
      std::memcpy(own.data, shared.data, bytes);
      buffer_s[number - words * repeats - 1] = now_s() - start_s;
      sink = sink + uint64_t(own.data[bytes / 2]);
      back.value.store(number, std::memory_order_release);
    }
  });
  std::thread asks([&] {
    keep_to(one);
    long number = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      double start_s = now_s();
      for (long i = 0; i < words; ++i) {
        there.value.store(++number, std::memory_order_release);
        while (back.value.load(std::memory_order_acquire) < number) {}
      }
      word_s[repeat] = (now_s() - start_s) / (2.0 * words);
    }
    for (int repeat = 0; repeat < repeats; ++repeat) {
      std::memset(shared.data, repeat + 1, bytes);
      there.value.store(++number, std::memory_order_release);
      while (back.value.load(std::memory_order_acquire) < number) {}
    }
  });
  asks.join(), answers.join();
  return 0;
}

// A byte for a byte, `bytes` for one byte: seconds of one way of a byte, and of all bytes, for each
// repeat. 0: done, 1: the other side has gone, or is silent.
int ping(int fd, double each_s, size_t bytes, int repeats, double *word_s, double *buffer_s) {
  std::vector<char> data(std::max(bytes, size_t(1)), 1);
  char byte = '1';
  // The first is not counted: cores that were busy just now answer sooner than cores that wait.
  for (int repeat = -1; repeat < repeats; ++repeat) {
    long words = 0;
    double start_s = now_s(), took_s;
    do {
      if (!send_all(fd, &byte, 1) || !receive_all(fd, &byte, 1)) return 1;
      ++words, took_s = now_s() - start_s;
    } while (took_s < each_s);
    if (repeat >= 0) word_s[repeat] = took_s / (2.0 * words);
  }
  for (int repeat = 0; repeat < repeats; ++repeat) {
    char word = 'L';
    uint64_t size = bytes;
    double start_s = now_s();
    if (!send_all(fd, &word, 1) || !send_all(fd, reinterpret_cast<char *>(&size), sizeof size) ||
        !send_all(fd, data.data(), bytes) || !receive_all(fd, &byte, 1))
      return 1;
    buffer_s[repeat] = now_s() - start_s;
  }
  return 0;
}

// The other side, until the one that asks has gone, or is silent.
void answer(int fd) {
  std::vector<char> data(kChunk);
  for (char word; recv(fd, &word, 1, 0) == 1;) {
    uint64_t left = 0;
    if (word == 'L' && !receive_all(fd, reinterpret_cast<char *>(&left), sizeof left)) return;
    while (left > 0) {
      size_t part = std::min(uint64_t(kChunk), left);
      if (!receive_all(fd, data.data(), part)) return;
      left -= part;
    }
    if (!send_all(fd, "1", 1)) return;
  }
}

}  // extern "C"
