// Lets fuzz targets find parsers whose work is not linear in the length of
// their input. Work is counted, not timed, so that the result does not depend
// on the speed of the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/functional/function_ref.h"

namespace kvasir::base {

// An input that begins with this word stands for a longer text, which
// ParseAtLinearCost builds (see there).
inline constexpr std::string_view kRepeat = "repeat ";
// Separates the three parts of such an input: head, unit and tail.
inline constexpr std::string_view kSeparator = "\n--\n";
// The built text gets no further copy of the unit after it has reached
// this length.
inline constexpr size_t kMaxRepeatedBytes = 256 << 10;

// The part of the allowed work, in the units below, that does not depend on the
// text's length.
inline constexpr uint64_t kConstantWork = 1'000'000;
// The same limit for parsers of protobuf messages. It is higher, because
// protobuf reserves up to 50 MB for a string before it finds that the message
// ends earlier. That memory is never touched, but reserving it counts as work.
inline constexpr uint64_t kConstantWorkOfMessage = 5'000'000;

// Calls `parse` with a text, and aborts if its work exceeds `constant_work` +
// `work_per_byte` * length of the text. Set `work_per_byte` to a few times the
// largest work per byte that was measured. A quadratic parser exceeds even this
// limit by far.
//
// If the input begins with kRepeat, a number of bytes and a line break follow,
// and then a head, a unit and a tail. The text is the head, copies of the unit
// until it has at least that number of bytes, and the tail. Each '#' in a copy
// becomes a digit of the copy's number, so that the keys of a JSON object
// differ. Any other input is itself the text.
//
// A unit of work is a comparison of two integers or an indirect call in code
// that is compiled for fuzzing, 16 bytes that such code copies or fills, or 16
// bytes that any code allocates. In libraries that are not compiled for
// fuzzing, only allocations count. So the comparisons and calls inside protobuf
// do not count, nor do the bytes that memchr, memcmp and strlen read.
// Threads: use from one thread only.
void ParseAtLinearCost(const uint8_t* data, size_t size, uint64_t work_per_byte,
                       absl::FunctionRef<void(std::string_view)> parse,
                       uint64_t constant_work = kConstantWork);

}  // namespace kvasir::base
