#include "base/fuzz/parser_cost.h"

#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "base/check.h"

namespace kvasir::base {
namespace {

constexpr uint64_t kBytesPerUnit = 16;

uint64_t work = 0;

__attribute__((no_sanitize("coverage", "address"))) void CountAllocation(
    const volatile void*, size_t bytes) {
  work += 1 + bytes / kBytesPerUnit;
}
void IgnoreFree(const volatile void*) {}

std::string RepeatedText(std::string_view input) {
  const auto part = [&input] {
    const size_t end = std::min(input.find(kSeparator), input.size());
    const std::string_view taken = input.substr(0, end);
    input.remove_prefix(std::min(end + kSeparator.size(), input.size()));
    return taken;
  };
  size_t bytes = 0;
  const size_t line = std::min(input.find('\n'), input.size());
  if (!absl::SimpleAtoi(absl::string_view(input.data(), line), &bytes)) {
    return "";
  }
  input.remove_prefix(std::min(line + 1, input.size()));
  bytes = std::min(bytes, kMaxRepeatedBytes);
  std::string text(part());
  const std::string_view unit = part();
  for (size_t copy = 0; !unit.empty() && text.size() < bytes; ++copy) {
    text.append(unit);
    // Write the copy's number from right to left: the last '#' gets the
    // last digit.
    size_t number = copy;
    std::for_each(text.rbegin(),
                  text.rbegin() + static_cast<std::ptrdiff_t>(unit.size()),
                  [&number](char& c) {
                    if (c != '#') return;
                    c = static_cast<char>('0' + number % 10);
                    number /= 10;
                  });
  }
  return text.append(input);
}

}  // namespace

void ParseAtLinearCost(const uint8_t* data, size_t size, uint64_t work_per_byte,
                       absl::FunctionRef<void(std::string_view)> parse,
                       uint64_t constant_work) {
  static const bool counts = __sanitizer_install_malloc_and_free_hooks(
                                 CountAllocation, IgnoreFree) != 0;
  KVASIR_CHECK(counts);
  std::string_view text(reinterpret_cast<const char*>(data), size);
  std::string repeated;
  if (text.starts_with(kRepeat)) {
    repeated = RepeatedText(text.substr(kRepeat.size()));
    text = repeated;
  }
  const uint64_t before = work;
  parse(text);
  const uint64_t done = work - before;
  const uint64_t most = constant_work + work_per_byte * text.size();
  if (done > most) {
    std::fprintf(stderr,
                 "a text of %zu bytes took %llu units of work, the limit is "
                 "%llu: the parser is not linear\n",
                 text.size(), static_cast<unsigned long long>(done),
                 static_cast<unsigned long long>(most));
    std::abort();
  }
}

}  // namespace kvasir::base

// The linker redirects calls of the wrapped functions to the functions defined
// here (--wrap in CMakeLists.txt). `musttail` keeps the caller's address, which
// libFuzzer reads.
#define KVASIR_COUNT(result, function, parameters, arguments, units) \
  result __real_##function parameters;                               \
  __attribute__((no_sanitize("coverage", "address")))                \
  result __wrap_##function parameters {                              \
    kvasir::base::work += units;                                     \
    [[clang::musttail]] return __real_##function arguments;          \
  }
#define KVASIR_COUNT_COMPARISON(kind, type)                                  \
  KVASIR_COUNT(void, __sanitizer_cov_trace_##kind, (type a, type b), (a, b), \
               1)                                                            \
  static_assert(true)
#define KVASIR_COUNT_BYTES(function, source)                             \
  KVASIR_COUNT(void*, __asan_##function,                                 \
               (void* to, source from, size_t bytes), (to, from, bytes), \
               1 + bytes / kvasir::base::kBytesPerUnit)                  \
  static_assert(true)
extern "C" {
KVASIR_COUNT_COMPARISON(cmp1, uint8_t);
KVASIR_COUNT_COMPARISON(cmp2, uint16_t);
KVASIR_COUNT_COMPARISON(cmp4, uint32_t);
KVASIR_COUNT_COMPARISON(cmp8, uint64_t);
KVASIR_COUNT_COMPARISON(const_cmp1, uint8_t);
KVASIR_COUNT_COMPARISON(const_cmp2, uint16_t);
KVASIR_COUNT_COMPARISON(const_cmp4, uint32_t);
KVASIR_COUNT_COMPARISON(const_cmp8, uint64_t);
KVASIR_COUNT(void, __sanitizer_cov_trace_switch,
             (uint64_t value, uint64_t* cases), (value, cases), 1)
KVASIR_COUNT(void, __sanitizer_cov_trace_pc_indir, (uintptr_t callee), (callee),
             1)
KVASIR_COUNT_BYTES(memcpy, const void*);
KVASIR_COUNT_BYTES(memmove, const void*);
KVASIR_COUNT_BYTES(memset, int);
}
