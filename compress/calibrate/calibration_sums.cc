#include "compress/calibrate/calibration_sums.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/for_each_index.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

// Number of rows and of columns in a block of a Gram matrix. Blocks are large
// enough for fast products, and small enough that most of the lower half need
// not be computed.
constexpr int64_t kGramBlock = 512;

constexpr char kStateKind[] = "calibration state";
constexpr char kCalibrationKind[] = "calibration";

at::Tensor Zeros(at::IntArrayRef shape, at::ScalarType type) {
  return at::zeros(shape, at::TensorOptions().dtype(type));
}

// Returns the matrix with the blocks above the diagonal mirrored to those below
// it.
at::Tensor Mirrored(const at::Tensor& gram) {
  return at::triu(gram) + at::triu(gram, 1).t();
}

// Calls `visit` with the name and the tensor of each field of a LayerSums
// (const or not).
template <typename Visit>
void VisitTensors(auto& layer, const Visit& visit) requires requires {
  layer.key_squares;
}
{
  visit("input_gram", layer.input_gram);
  visit("input_sum", layer.input_sum);
  visit("query_squares", layer.query_squares);
  visit("key_squares", layer.key_squares);
  visit("value_squares", layer.value_squares);
  visit("rotated_key_gram", layer.rotated_key_gram);
  visit("rotated_key_sum", layer.rotated_key_sum);
  visit("key_information", layer.key_information);
  visit("value_information", layer.value_information);
  visit("domain_key_information", layer.domain_key_information);
  visit("domain_value_information", layer.domain_value_information);
  visit("sample_rows", layer.sample_rows);
}

// Calls `visit` with the name and the tensor of each field of a
// LayerCalibration (const or not).
template <typename Visit>
void VisitTensors(auto& layer, const Visit& visit) requires requires {
  layer.key_fisher;
}
{
  visit("input_gram", layer.input_gram);
  visit("input_sum", layer.input_sum);
  visit("query_energy", layer.query_energy);
  visit("key_fisher", layer.key_fisher);
  visit("value_fisher", layer.value_fisher);
  visit("key_fisher_root", layer.key_fisher_root);
  visit("value_fisher_root", layer.value_fisher_root);
  visit("rotated_key_gram", layer.rotated_key_gram);
  visit("rotated_key_sum", layer.rotated_key_sum);
  visit("key_information", layer.key_information);
  visit("value_information", layer.value_information);
  for (size_t d = 0; d < layer.domains.size(); ++d) {
    auto& domain = layer.domains[d];
    visit(absl::StrCat("domains.", d, ".key_information"),
          domain.key_information);
    visit(absl::StrCat("domains.", d, ".value_information"),
          domain.value_information);
  }
  visit("sample_rows", layer.sample_rows);
}

template <typename Layers>
void PutLayers(Layers& layers, TensorFile& file) {
  for (size_t l = 0; l < layers.size(); ++l) {
    VisitTensors(
        layers[l], [&](const std::string& name, const at::Tensor& tensor) {
          if (tensor.defined()) {
            file.tensors[absl::StrCat("layers.", l, ".", name)] = tensor.cpu();
          }
        });
  }
}

template <typename Layers>
void TakeLayers(const TensorFile& file, Layers& layers) {
  for (size_t l = 0; l < layers.size(); ++l) {
    VisitTensors(layers[l], [&](const std::string& name, at::Tensor& tensor) {
      const auto found =
          file.tensors.find(absl::StrCat("layers.", l, ".", name));
      if (found != file.tensors.end()) tensor = found->second;
    });
  }
}

// Returns the file's text, parsed as JSON. Returns nullopt if the text has
// another kind or id.
std::optional<nlohmann::json> TextOf(const TensorFile& file,
                                     std::string_view kind,
                                     const std::string& id) {
  nlohmann::json text = nlohmann::json::parse(file.text, nullptr, false);
  if (!text.is_object() || text.value("kind", "") != kind ||
      text.value("id", "") != id) {
    return std::nullopt;
  }
  return text;
}

struct FisherRows {
  at::Tensor sum;
  at::Tensor root;
};

FisherRows RowsOf(const at::Tensor& squares, int64_t num_sequences) {
  const at::Tensor mean =
      squares.to(at::kDouble) / static_cast<double>(num_sequences);
  return {mean.sum(1), mean.sqrt().sum(1)};
}

int64_t NumRows(const CalibrationSample& sample,
                const CalibrationParts& parts) {
  return std::min(parts.sample_rows,
                  sample.num_sequences() * sample.counted_tokens_each());
}

// Returns the number of counted tokens of each domain.
std::vector<int64_t> DomainTokens(const CalibrationSample& sample) {
  std::vector<int64_t> tokens(static_cast<size_t>(sample.num_domains()));
  for (int64_t i = 0; i < sample.counted_sequences(); ++i) {
    tokens[static_cast<size_t>(sample.DomainOf(i))] +=
        sample.counted_tokens_each();
  }
  return tokens;
}

// Fills in each layer's list of domains and the positions of its sample rows.
// Both follow from the sample.
void Describe(const CalibrationSample& sample, const CalibrationParts& parts,
              Calibration& calibration) {
  const std::vector<int64_t> tokens = DomainTokens(sample);
  const std::vector<SampledRow> rows = SpreadRows(sample, parts.sample_rows);
  std::vector<int64_t> positions;
  std::vector<int64_t> domains;
  at::Tensor held_out =
      at::zeros({static_cast<int64_t>(rows.size())}, at::kBool);
  for (size_t r = 0; r < rows.size(); ++r) {
    positions.push_back(rows[r].position);
    domains.push_back(sample.DomainOf(rows[r].sequence));
    held_out[static_cast<int64_t>(r)] =
        rows[r].sequence >= sample.counted_sequences();
  }
  // All layers share one copy of these tensors.
  const at::Tensor position = at::tensor(positions);
  const at::Tensor domain_of = at::tensor(domains);
  for (LayerCalibration& layer : calibration.layers) {
    layer.domains.resize(tokens.size());
    for (size_t d = 0; d < tokens.size(); ++d) {
      layer.domains[d].tokens = tokens[d];
      if (!sample.domains.empty()) layer.domains[d].name = sample.domains[d];
    }
    layer.sample_positions = position;
    layer.sample_domains = domain_of;
    layer.sample_held_out = held_out;
  }
}

// Divides the sums of information by their number of terms and moves the
// resulting means to `layer`.
void FinishInformation(const CalibrationSample& sample,
                       const CalibrationParts& parts, LayerSums& sums,
                       LayerCalibration& layer) {
  const auto labels = static_cast<double>(parts.labels_per_position);
  const double all = static_cast<double>(sample.counted_tokens()) * labels;
  layer.key_information = sums.key_information.div_(all);
  layer.value_information = sums.value_information.div_(all);
  const std::vector<int64_t> tokens = DomainTokens(sample);
  layer.domains.resize(tokens.size());
  for (size_t d = 0; d < tokens.size(); ++d) {
    const auto index = static_cast<int64_t>(d);
    const double part =
        static_cast<double>(std::max<int64_t>(tokens[d], 1)) * labels;
    layer.domains[d].key_information =
        sums.domain_key_information[index].div_(part);
    layer.domains[d].value_information =
        sums.domain_value_information[index].div_(part);
  }
  layer.sample_rows = sums.sample_rows;
}

}  // namespace

LayerSums ZeroSums(const model::DecoderSpec& spec,
                   const CalibrationSample& sample,
                   const CalibrationParts& parts) {
  const int64_t m = spec.hidden_size;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  LayerSums sums;
  sums.input_gram = Zeros({m, m}, at::kDouble);
  sums.input_sum = Zeros({m}, at::kDouble);
  sums.query_squares = Zeros({spec.num_heads, spec.head_dim}, at::kDouble);
  if (parts.fisher) {
    sums.key_squares = Zeros({kv, m}, at::kFloat);
    sums.value_squares = Zeros({kv, m}, at::kFloat);
  }
  if (parts.rotated_keys) {
    sums.rotated_key_gram = Zeros({kv, kv}, at::kDouble);
    sums.rotated_key_sum = Zeros({kv}, at::kDouble);
  }
  if (parts.information) {
    const int64_t domains = sample.num_domains();
    sums.key_information = Zeros({kv, kv}, at::kDouble);
    sums.value_information = Zeros({kv, kv}, at::kDouble);
    sums.domain_key_information = Zeros({domains, kv, kv}, at::kFloat);
    sums.domain_value_information = Zeros({domains, kv, kv}, at::kFloat);
    sums.sample_rows = Zeros({NumRows(sample, parts), 2 * kv}, at::kFloat);
  }
  return sums;
}

int64_t SumBytes(const model::DecoderSpec& spec,
                 const CalibrationSample& sample,
                 const CalibrationParts& parts) {
  const int64_t m = spec.hidden_size;
  const int64_t kv = spec.num_kv_heads * spec.head_dim;
  int64_t bytes = 8 * (m * m + m + spec.num_heads * spec.head_dim);
  if (parts.fisher) bytes += 4 * 2 * kv * m;
  if (parts.rotated_keys) bytes += 8 * (kv * kv + kv);
  if (parts.information) {
    bytes += 2 * kv * kv * (8 + 4 * sample.num_domains()) +
             4 * 2 * kv * NumRows(sample, parts);
  }
  return bytes * spec.num_layers();
}

void AddGram(const at::Tensor& rows, int threads, at::Tensor& gram) {
  const at::NoGradGuard no_grad;
  const at::Tensor wide = rows.to(at::kDouble);
  const int64_t width = wide.size(1);
  const int64_t blocks = (width + kGramBlock - 1) / kGramBlock;
  struct Block {
    int64_t row;
    int64_t column;
  };
  std::vector<Block> upper;
  for (int64_t row = 0; row < blocks; ++row) {
    for (int64_t column = row; column < blocks; ++column) {
      upper.push_back({row * kGramBlock, column * kGramBlock});
    }
  }
  // Each thread computes whole blocks, so a product uses one BLAS thread.
  const ScopedBlasThreads blas_threads(1);
  ForEachIndex(static_cast<int64_t>(upper.size()), threads, [&](int64_t i) {
    const at::NoGradGuard no_grad_here;
    const Block& block = upper[static_cast<size_t>(i)];
    const int64_t row_end = std::min(block.row + kGramBlock, width);
    const int64_t column_end = std::min(block.column + kGramBlock, width);
    gram.slice(0, block.row, row_end)
        .slice(1, block.column, column_end)
        .addmm_(wide.slice(1, block.row, row_end).t(),
                wide.slice(1, block.column, column_end));
  });
}

void AddInformation(const SequenceInformation& information, int64_t domain,
                    LayerSums& sums) {
  const at::NoGradGuard no_grad;
  sums.key_information += information.key;
  sums.value_information += information.value;
  sums.domain_key_information[domain] += information.key.to(at::kFloat);
  sums.domain_value_information[domain] += information.value.to(at::kFloat);
}

void MoveSums(at::Device device, CalibrationState& state) {
  for (LayerSums& layer : state.layers) {
    VisitTensors(layer, [&](const std::string&, at::Tensor& tensor) {
      if (tensor.defined()) tensor = tensor.to(device);
    });
  }
}

TensorFile StateToFile(const CalibrationState& state, const std::string& id) {
  TensorFile file;
  file.text = nlohmann::json({{"kind", kStateKind},
                              {"id", id},
                              {"layer", state.layer},
                              {"sequence", state.sequence}})
                  .dump();
  PutLayers(state.layers, file);
  if (state.hidden.defined()) file.tensors["hidden"] = state.hidden;
  // The sum is stored as a tensor, which keeps every bit of the number.
  file.tensors["loss_sum"] = at::full({1}, state.loss_sum, at::kDouble);
  return file;
}

absl::StatusOr<CalibrationState> StateFromFile(const TensorFile& file,
                                               const std::string& id,
                                               const model::DecoderSpec& spec,
                                               const CalibrationSample& sample,
                                               const CalibrationParts& parts) {
  const std::optional<nlohmann::json> text = TextOf(file, kStateKind, id);
  const auto loss = file.tensors.find("loss_sum");
  if (!text || loss == file.tensors.end() || loss->second.numel() != 1) {
    return absl::DataLossError(
        "the file does not hold the state of this calibration");
  }
  CalibrationState state;
  state.layer = text->value("layer", int64_t{0});
  state.sequence = text->value("sequence", int64_t{0});
  state.loss_sum = loss->second.item<double>();
  state.layers.resize(static_cast<size_t>(spec.num_layers()));
  TakeLayers(file, state.layers);
  const auto hidden = file.tensors.find("hidden");
  if (hidden != file.tensors.end()) state.hidden = hidden->second;
  bool whole = state.hidden.defined() != parts.has_gradients();
  const LayerSums want = ZeroSums(spec, sample, parts);
  for (LayerSums& layer : state.layers) {
    whole = whole && layer.input_gram.defined() &&
            layer.input_gram.sizes() == want.input_gram.sizes() &&
            layer.key_squares.defined() == parts.fisher &&
            layer.rotated_key_gram.defined() == parts.rotated_keys &&
            layer.sample_rows.defined() == parts.information;
  }
  if (!whole)
    return absl::DataLossError(
        "the file holds the state of a calibration of another model");
  return state;
}

absl::StatusOr<Calibration> FinishCalibration(CalibrationState state,
                                              const std::string& id,
                                              const CalibrationSample& sample,
                                              const CalibrationParts& parts) {
  Calibration result;
  result.id = id;
  result.num_sequences = sample.counted_sequences();
  result.num_tokens = sample.counted_tokens();
  for (size_t l = 0; l < state.layers.size(); ++l) {
    LayerSums& sums = state.layers[l];
    LayerCalibration layer;
    layer.input_gram = Mirrored(sums.input_gram);
    layer.input_sum = sums.input_sum;
    layer.query_energy =
        sums.query_squares / static_cast<double>(result.num_tokens);
    if (sums.key_squares.defined()) {
      const FisherRows key = RowsOf(sums.key_squares, result.num_sequences);
      const FisherRows value = RowsOf(sums.value_squares, result.num_sequences);
      layer.key_fisher = key.sum;
      layer.key_fisher_root = key.root;
      layer.value_fisher = value.sum;
      layer.value_fisher_root = value.root;
    }
    if (sums.rotated_key_gram.defined()) {
      layer.rotated_key_gram = Mirrored(sums.rotated_key_gram);
      layer.rotated_key_sum = sums.rotated_key_sum;
    }
    if (parts.information) FinishInformation(sample, parts, sums, layer);
    sums = LayerSums();  // frees the layer's sums, including its Gram matrix
    bool finite = true;
    VisitTensors(layer, [&](const std::string&, const at::Tensor& tensor) {
      if (tensor.defined()) {
        finite = finite && at::isfinite(tensor).all().item<bool>();
      }
    });
    if (!finite) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", l, ": the calibration sums are not finite: ",
          "weights of this layer, or of one before it, are NaN or too large"));
    }
    result.layers.push_back(std::move(layer));
  }
  if (parts.information) Describe(sample, parts, result);
  return result;
}

TensorFile CalibrationToFile(const Calibration& calibration) {
  TensorFile file;
  file.text = nlohmann::json({{"kind", kCalibrationKind},
                              {"id", calibration.id},
                              {"num_tokens", calibration.num_tokens},
                              {"num_sequences", calibration.num_sequences},
                              {"num_layers", calibration.layers.size()}})
                  .dump();
  PutLayers(calibration.layers, file);
  return file;
}

absl::StatusOr<Calibration> CalibrationFromFile(const TensorFile& file,
                                                const std::string& id,
                                                const CalibrationSample& sample,
                                                const CalibrationParts& parts) {
  const std::optional<nlohmann::json> text = TextOf(file, kCalibrationKind, id);
  if (!text)
    return absl::DataLossError(
        "the file does not hold the calibration with the expected id");
  Calibration calibration;
  calibration.id = id;
  calibration.num_tokens = text->value("num_tokens", int64_t{0});
  calibration.num_sequences = text->value("num_sequences", int64_t{0});
  calibration.layers.resize(text->value("num_layers", size_t{0}));
  if (parts.information) Describe(sample, parts, calibration);
  TakeLayers(file, calibration.layers);
  return calibration;
}

}  // namespace kvasir::compress
