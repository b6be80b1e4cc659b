// Integer ids of different kinds that the compiler keeps apart: StrongId<struct
// PageTag> converts neither to a StrongId of another tag nor to an integer.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <ostream>

namespace kvasir::base {

template <typename Tag, typename Value = int32_t>
class StrongId {
 public:
  using value_type = Value;
  constexpr StrongId() = default;
  constexpr explicit StrongId(Value value) : value_(value) {}
  constexpr Value value() const { return value_; }
  constexpr bool valid() const { return value_ >= 0; }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
  friend std::ostream& operator<<(std::ostream& out, StrongId id) {
    return out << id.value_;
  }
  template <typename H>
  friend H AbslHashValue(H state, StrongId id) {
    return H::combine(std::move(state), id.value_);
  }

 private:
  Value value_ = Value(-1);  // -1: an invalid id
};

}  // namespace kvasir::base
