// A named model shape with single sizes replaced, as init and pretrain take it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "model/shapes/shapes.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

inline constexpr char kSizesGroup[] = "Sizes in place of the shape's";

// 0 keeps the shape's own.
struct ShapeFlags {
  std::string name;
  model::ModelShape sizes;
  double rope_theta = 0.0;
  std::string head;  // "", "tied" or "untied"
};

void AddShapeFlags(CLI::App* command, const std::string& name_flag,
                   ShapeFlags& flags);

// NotFound for a name that no shape has.
absl::StatusOr<model::ModelShape> ShapeOf(const ShapeFlags& flags);

}  // namespace kvasir::cli
