// Lets fuzz targets find parsers whose work is not linear in the length of
// their input. Work is counted, not timed, so that a slow machine cannot fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/functional/function_ref.h"

namespace kvasir::base {

// The first word of an input that stands for a long text.
inline constexpr std::string_view kRepeat = "repeat ";
// Separates the head, the unit and the tail of such an input.
inline constexpr std::string_view kSeparator = "\n--\n";
// The greatest length of such a text, without its tail and its last unit.
inline constexpr size_t kMaxRepeatedBytes = 256 << 10;

// Every parser may do this much work, however short the text is.
inline constexpr uint64_t kConstantWork = 1'000'000;
// Parsers of protobuf messages may do this much work, because protobuf
// reserves up to 50 MB for a string before it finds that the message ends
// earlier. That memory is never touched, but reserving it counts as work.
inline constexpr uint64_t kConstantWorkOfMessage = 5'000'000;

// Calls `parse` with a text, and aborts if it worked more than `constant_work`
// and `work_per_byte` for each byte. A good limit is a few times the most that
// is known: quadratic work exceeds it many times.
//
// After kRepeat, an input has a number of bytes and a line break, and then a
// head, a unit and a tail. Its text is the head, then so many copies of the
// unit that the text has at least that number of bytes, then the tail. Each '#'
// in a copy becomes a digit of the copy's number, so that the keys of an object
// differ. Any other input is itself the text.
//
// A unit of work is a comparison of two integers or an indirect call in code
// that is compiled for fuzzing, 16 bytes that such code copies or fills, or 16
// bytes that any code allocates. Inside libraries that are not compiled for
// fuzzing, only memory counts. So protobuf's own work is not seen, nor how many
// bytes memchr, memcmp and strlen read.
// Threads: one.
void ParseAtLinearCost(const uint8_t* data, size_t size, uint64_t work_per_byte,
                       absl::FunctionRef<void(std::string_view)> parse,
                       uint64_t constant_work = kConstantWork);

}  // namespace kvasir::base
