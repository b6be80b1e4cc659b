// Tests, element by element, how LoadWeights loads the tensors of a compressed
// layer, on one rank and on two.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "google/protobuf/util/json_util.h"
#include "model/shapes/shape_config.h"
#include "worker/testing/prompt_lift_cases.h"
#include "worker/testing/tiny_rank.h"
#include "worker/testing/weights_test_util.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using kernels::DType;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr int64_t kModelDim = 32;
constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
constexpr char kFullValue[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";

// Counts how often each tensor is read.
class CountingSource final : public WeightSource {
 public:
  explicit CountingSource(WeightSource* source) : source_(source) {}
  absl::StatusOr<DType> TypeOf(const std::string& name) const override {
    return source_->TypeOf(name);
  }
  absl::StatusOr<MatrixSize> SizeOf(const std::string& name) const override {
    return source_->SizeOf(name);
  }
  absl::Status Read(const std::string& name, const ReadRange& range,
                    std::span<std::byte> buffer, Consumer consume) override {
    ++reads_[name];
    return source_->Read(name, range, buffer, consume);
  }
  std::string WeightTiles() const override { return source_->WeightTiles(); }
  const std::map<std::string, int>& reads() const { return reads_; }

 private:
  WeightSource* const source_;
  std::map<std::string, int> reads_;
};

// The tiny model (8 query heads and 4 KV heads of 8 dims, hidden size 32) with
// a compressed first layer.
struct Model {
  model::DecoderSpec spec;
  kvasir::v1::KvPlan plan;
  std::unique_ptr<RandomSource> source;
};

Model MakeModel(const std::string& key, const std::string& value) {
  Model model;
  model.spec = *model::SpecOfShape(TinyShape());
  model.plan =
      plan::FullRankPlan(model::AttentionShapeOf(model.spec), kvasir::v1::BF16);
  const std::string json = absl::StrCat(
      R"({"key":{"parts":[)", key, R"(]},"value":{"parts":[)", value, "]}}");
  model.plan.mutable_layers(0)->Clear();
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(
                  json, model.plan.mutable_layers(0))
                  .ok());
  KVASIR_EXPECT_OK(
      plan::ValidatePlan(model.plan, model::AttentionShapeOf(model.spec)));
  auto source =
      RandomSource::Create(TinyShape(), model.spec,
                           Resolved(model.plan, model.spec), 1, DType::kBf16);
  KVASIR_EXPECT_OK(source.status());
  model.source = *std::move(source);
  return model;
}

struct Loaded {
  std::unique_ptr<base::ThreadPool> pool;
  std::unique_ptr<kernels::Device> device;
  ModelWeights weights;
  std::map<std::string, int> reads;

  const LayerWeights& layer() const { return weights.layers[0]; }
};

Loaded Load(const Model& model, plan::TpShard shard = {}) {
  Loaded loaded;
  loaded.pool = std::make_unique<base::ThreadPool>(1);
  loaded.device = std::make_unique<kernels::CpuDevice>(loaded.pool.get());
  CountingSource source(model.source.get());
  // The read buffer is small, so that a tensor's rows come in several blocks.
  auto weights =
      LoadWeights(model.spec, Served(model.plan, model.spec, {}, shard),
                  &source, loaded.device.get(),
                  {.pool = loaded.pool.get(), .read_buffer_bytes = 300});
  KVASIR_EXPECT_OK(weights.status());
  if (weights.ok()) loaded.weights = *std::move(weights);
  loaded.reads = source.reads();
  return loaded;
}

std::vector<std::vector<float>> Tensor(const Model& model,
                                       const std::string& name,
                                       int64_t columns) {
  return Rows(*model.source, "model.layers.0.self_attn." + name, columns);
}

// A low_rank part: KV heads 0 and 2 share a latent of rank 6, and KV heads 3
// and 1 share a latent of rank 5.
std::string LowRank(const std::string& lift, const std::string& stored,
                    const std::string& rest = "") {
  return absl::StrCat(R"({"low_rank":{"groups":[{"heads":[0,2],"rank":6},)",
                      R"({"heads":[3,1],"rank":5}]},"uses":[{")", lift,
                      R"(":{}}],"stored":")", stored,
                      R"(","codec":{"dtype":"BF16"})", rest, "}");
}

void ExpectColumns(const kernels::PackedMatrix& matrix, int64_t first_column,
                   const std::vector<std::vector<float>>& rows) {
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t k = 0; k < rows[row].size(); ++k) {
      ASSERT_EQ(Element(matrix, static_cast<int64_t>(k),
                        first_column + static_cast<int64_t>(row)),
                rows[row][k])
          << row << ", " << k;
    }
  }
}

void ExpectReadOnce(const model::ModelShape& shape, const PlanCase& each) {
  SCOPED_TRACE(each.name);
  Model model;
  model.spec = *model::SpecOfShape(shape);
  model.plan = PlanOf(each, model.spec);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      model.source,
      RandomSource::Create(shape, model.spec, Resolved(model.plan, model.spec),
                           1, DType::kBf16));
  const auto wanted =
      model::RequiredTensors(model.spec, Resolved(model.plan, model.spec));
  KVASIR_ASSERT_OK(wanted);
  for (const plan::TpShard shard :
       {plan::TpShard{0, 1}, plan::TpShard{0, 4}, plan::TpShard{3, 4}}) {
    const Loaded loaded = Load(model, shard);
    EXPECT_EQ(loaded.reads.size(), wanted->size());
    EXPECT_THAT(loaded.reads, Each(Pair(::testing::_, 1)));
    // CountWeightBytes must count exactly the bytes that LoadWeights allocates.
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const int64_t counted,
        CountWeightBytes(model.spec, Served(model.plan, model.spec, {}, shard),
                         model.source.get(), MatrixFormat::Of(*loaded.device)));
    EXPECT_EQ(
        counted,
        loaded.device->allocator().use(kernels::MemoryTag::kWeights).bytes);
  }
}

TEST(AttentionWeightsTest, EveryRankReadsEachTensorThatItNeedsOnce) {
  for (const PlanCase& each : PlanCases()) ExpectReadOnce(TinyShape(), each);
  for (const FamilyCase& each : FamilyCases(0)) {
    ExpectReadOnce(each.shape, each.plan_case);
  }
  for (const FamilyCase& each : PromptLiftCases()) {
    ExpectReadOnce(each.shape, each.plan_case);
  }
}

absl::Status LoadChanged(const Model& model, ChangedSource::Change change) {
  ChangedSource source(model.source.get(), std::move(change));
  base::ThreadPool pool(1);
  kernels::CpuDevice device(&pool);
  return LoadWeights(model.spec,
                     Served(model.plan, model.spec, {.lift_prompts = false}),
                     &source, &device, {.pool = &pool})
      .status();
}

TEST(AttentionWeightsTest,
     TheErrorForAnInvalidStaticRangeStatesItsTensorRowAndValue) {
  const std::string codec =
      R"("codec":{"bits":{"schedule":[4]},"channel_static":{}}})";
  Model model = MakeModel(R"({"full":{},"stored":"POST_ROPE",)" + codec,
                          R"({"full":{},"stored":"NO_ROPE",)" + codec);
  const std::string name = "model.layers.0.self_attn.v_proj.range.";
  const auto with = [&](const std::string& which, float value) {
    return LoadChanged(model, [&, value](const std::string& tensor,
                                         const WeightBlock& block,
                                         WeightSource::Consumer consume) {
      if (tensor != name + which) return consume(block);
      // A bf16 number is the upper half of a float32.
      std::vector<uint16_t> numbers(static_cast<size_t>(block.num_rows));
      std::memcpy(numbers.data(), block.data,
                  numbers.size() * sizeof(uint16_t));
      numbers[5] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      WeightBlock changed = block;
      changed.data = numbers.data();
      return consume(changed);
    });
  };
  const float infinity = std::numeric_limits<float>::infinity();
  KVASIR_EXPECT_OK(with("min", -2.0f));
  KVASIR_EXPECT_OK(with("scale", 0.0f));
  for (const auto& [which, value, text] :
       std::vector<std::tuple<std::string, float, std::string>>{
           {"min", -infinity, "-inf"},
           {"min", std::nanf(""), "nan"},
           {"scale", infinity, "inf"},
           {"scale", -0.5f, "-0.5"}}) {
    EXPECT_THAT(with(which, value),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(name + which), HasSubstr("row 5"),
                               HasSubstr(text))));
  }
}

// The changed tensors are loaded in different ways: as matrices, as a vector,
// and as a table.
TEST(AttentionWeightsTest,
     TheErrorForAWeightThatIsNotFiniteStatesItsTensorRowAndColumn) {
  const Model model = MakeModel(kFullKey, kFullValue);
  for (const auto& [named, at_row, at_column] :
       std::vector<std::tuple<std::string, int64_t, int64_t>>{
           {"model.layers.0.self_attn.k_proj.weight", 31, 31},
           {"model.layers.1.mlp.down_proj.weight", 7, 47},
           {"model.layers.1.input_layernorm.weight", 3, 0},
           {"model.embed_tokens.weight", 1236, 0},
           {"lm_head.weight", 40, 9}}) {
    // lambdas cannot capture structured bindings
    const std::string& name = named;
    const int64_t row = at_row;
    const int64_t column = at_column;
    for (const auto& each :
         {std::pair<uint16_t, const char*>{0x7fc0, "nan"}, {0xff80, "-inf"}}) {
      const uint16_t bits = each.first;
      const char* const text = each.second;
      EXPECT_THAT(
          LoadChanged(model,
                      [&](const std::string& tensor, const WeightBlock& block,
                          WeightSource::Consumer consume) {
                        if (tensor != name || row < block.first_row ||
                            row >= block.first_row + block.num_rows) {
                          return consume(block);
                        }
                        std::vector<uint16_t> numbers(static_cast<size_t>(
                            block.num_rows * block.columns));
                        std::memcpy(numbers.data(), block.data,
                                    numbers.size() * sizeof(uint16_t));
                        numbers[static_cast<size_t>(
                            (row - block.first_row) * block.columns + column)] =
                            bits;
                        WeightBlock changed = block;
                        changed.data = numbers.data();
                        return consume(changed);
                      }),
          StatusIs(absl::StatusCode::kInvalidArgument,
                   HasSubstr(absl::StrCat(
                       "tensor ", name, ": row ", row, ", column ", column,
                       ": must be a finite number, but is ", text))));
    }
  }
}

TEST(AttentionWeightsTest, TensorsOfTheWrongSizeAreRefused) {
  const Model model = MakeModel(kFullKey, kFullValue);
  const std::string name = "model.layers.1.self_attn.v_proj.weight";
  const auto with = [&](int64_t columns, int64_t missing_rows) {
    return LoadChanged(
        model, [&, columns, missing_rows](const std::string& tensor,
                                          const WeightBlock& block,
                                          WeightSource::Consumer consume) {
          WeightBlock changed = block;
          if (tensor == name) {
            changed.columns = columns;
            changed.num_rows -= missing_rows;
          }
          return consume(changed);
        });
  };
  KVASIR_EXPECT_OK(with(kModelDim, 0));
  EXPECT_THAT(
      with(kModelDim - 1, 0),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr(name), HasSubstr("31"), HasSubstr("32"))));
  EXPECT_THAT(with(kModelDim, 3),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(name), HasSubstr("29 rows"))));
}

TEST(AttentionWeightsTest,
     APlanBeyondTheLimitsOfTheKernelsIsRefusedBeforeTensorsAreRead) {
  struct Case {
    model::ModelShape shape;
    std::string key;
    std::string value;
    std::string text;
  };
  model::ModelShape wide = TinyShape();  // heads of 264 dims
  wide.head_dim = 264;
  wide.num_query_heads = wide.num_kv_heads = 4;
  model::ModelShape widest = wide;  // 32 such heads: 8448 dims
  widest.num_query_heads = widest.num_kv_heads = 32;
  const std::string basis =
      R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16",)"
      R"("basis_static":{}}})";
  const std::string groups = R"("groups":[{"heads":[0,1,2,3],"rank":1028}]},)";
  for (const Case& each : {
           Case{wide, kFullKey,
                R"({"low_rank":{)" + groups +
                    R"("uses":[{"fold":{}}],"stored":"NO_ROPE","codec":{)"
                    R"("bits":{"schedule":[4]},"per_token":{"group":4},)"
                    R"("param_dtype":"F16"}})",
                "layer 1 value part 0: 257 runs of codes in a latent; this "
                "build "
                "serves at most 256"},
           Case{widest, kFullKey, basis,
                "layer 1 value part 0: 8448 numbers in a latent; this build "
                "serves "
                "at most 8192"},
           Case{wide,
                R"({"low_rank":{)" + groups +
                    R"("uses":[{"reconstruct":{}}],"stored":"PRE_ROPE",)"
                    R"("codec":{"dtype":"BF16"}})",
                kFullValue,
                "layer 1 key part 0: 264 numbers in a rebuilt key; this "
                "build serves at most 256"},
       }) {
    SCOPED_TRACE(each.text);
    auto spec = model::SpecOfShape(each.shape);
    KVASIR_ASSERT_OK(spec);
    auto plan =
        plan::FullRankPlan(model::AttentionShapeOf(*spec), kvasir::v1::BF16);
    const std::string json =
        absl::StrCat(R"({"key":{"parts":[)", each.key,
                     R"(]},"value":{"parts":[)", each.value, "]}}");
    plan.mutable_layers(1)->Clear();
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(
                    json, plan.mutable_layers(1))
                    .ok());
    KVASIR_ASSERT_OK(plan::ValidatePlan(plan, model::AttentionShapeOf(*spec)));
    KVASIR_ASSERT_OK_AND_ASSIGN(
        auto random,
        RandomSource::Create(each.shape, *spec, Resolved(plan, *spec), 1,
                             DType::kBf16));
    CountingSource source(random.get());
    EXPECT_THAT(
        Rank::Create(*spec, plan, &source, TinyOptions()).status(),
        StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(each.text)));
    EXPECT_TRUE(source.reads().empty());
  }
}

TEST(AttentionWeightsTest, RebuiltKeysHaveALiftMatrixForEachKvHead) {
  const Model model = MakeModel(LowRank("reconstruct", "PRE_ROPE"), kFullValue);
  const auto down = Tensor(model, "k_proj.down.weight", kModelDim);
  const std::vector<std::vector<std::vector<float>>> up = {
      Tensor(model, "k_proj.up.0.weight", 6),
      Tensor(model, "k_proj.up.1.weight", 5)};
  struct Place {
    size_t group;
    size_t place;
  };
  const Place place_of[4] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}};
  for (const int64_t size : {1, 2}) {
    for (int64_t rank = 0; rank < size; ++rank) {
      const Loaded loaded = Load(model, {rank, size});
      const LayerWeights& layer = loaded.layer();
      // With 2 ranks, each rank has one head of each group, so it loads both
      // latents.
      ExpectColumns(layer.qkv, 64 / size, down);
      const PartWeights& key = layer.key[0];
      ASSERT_EQ(key.up.size(), 4 / size);
      EXPECT_TRUE(key.lift.empty());
      for (size_t local = 0; local < key.up.size(); ++local) {
        const Place from =
            place_of[local + static_cast<size_t>(rank) * key.up.size()];
        const size_t width = from.group == 0 ? 6 : 5;
        for (size_t row = 0; row < 8; ++row) {
          for (size_t i = 0; i < width; ++i) {
            ASSERT_EQ(key.up[local].device_address()[row * width + i],
                      up[from.group][from.place * 8 + row][i]);
          }
        }
      }
    }
  }
}

TEST(AttentionWeightsTest, ValuesLiftedAtRunTimeHaveALiftMatrixForEachHead) {
  const Model model = MakeModel(kFullKey, LowRank("at_runtime", "NO_ROPE"));
  const auto up = Tensor(model, "v_proj.up.1.weight", 5);
  const Loaded loaded = Load(model, {1, 2});  // this rank has heads 2 and 3
  const kernels::PackedMatrix& lift = loaded.layer().value.lift[1];
  EXPECT_EQ(lift.k, 5);
  EXPECT_EQ(lift.n, 8);
  EXPECT_EQ(lift.dtype, DType::kBf16);
  // lift[1] belongs to head 3, the second head of group 1.
  ExpectColumns(lift, 0, {up.begin() + 8, up.end()});
}

TEST(AttentionWeightsTest,
     ARankWithFoldedValuesLoadsTheOutputColumnsOfItsHeads) {
  const Model model = MakeModel(kFullKey, LowRank("fold", "NO_ROPE"));
  // There are two query heads for each KV head, and the KV heads have ranks 6,
  // 5, 6, 5: 44 columns in all.
  const auto o = Tensor(model, "o_proj.weight", 44);
  const Loaded loaded = Load(model, {1, 2});
  const kernels::PackedMatrix& own = loaded.layer().o;
  EXPECT_EQ(own.k, 22);
  for (int64_t k = 0; k < 22; ++k) {
    ASSERT_EQ(Element(own, k, 7), o[7][static_cast<size_t>(22 + k)]);
  }
}

TEST(AttentionWeightsTest, QueryRowsOfTheKeptRotationPairsAreLoaded) {
  std::string heads;
  for (int head = 0; head < 4; ++head) {
    absl::StrAppend(&heads, head == 0 ? "" : ",", R"({"pair_indices":[)",
                    head % 2, ",3]}");
  }
  const Model model = MakeModel(
      absl::StrCat(R"({"rope_pairs":{"per_head":[)", heads,
                   R"(]},"uses":[{"at_runtime":{}}],"stored":"POST_ROPE",)",
                   R"("codec":{"dtype":"BF16"}})"),
      kFullValue);
  const auto q = Tensor(model, "q_proj.weight", kModelDim);
  const auto k = Tensor(model, "k_proj.weight", kModelDim);
  const Loaded loaded = Load(model, {1, 2});
  const LayerWeights& layer = loaded.layer();
  // This rank's query heads 4..7 read KV head 2, which keeps pairs 0 and 3, and
  // KV head 3, which keeps pairs 1 and 3.
  for (int64_t h = 0; h < 4; ++h) {
    const size_t first = h < 2 ? 0 : 1;
    const auto head = static_cast<size_t>(32 + h * 8);
    ExpectColumns(
        layer.qkv, h * 4,
        {q[head + first], q[head + 3], q[head + first + 4], q[head + 7]});
  }
  ExpectColumns(layer.qkv, 16, {k.begin() + 8, k.end()});
}

TEST(AttentionWeightsTest,
     AStaticBasisIsLoadedAsItsMatrixAndAsALiftForEachHead) {
  const std::string codec =
      R"(,"codec":{"bits":{"schedule":[8,4,4,4,2,2,0,0]},)"
      R"("channel_static":{},"basis_static":{}}})";
  const Model model =
      MakeModel(R"({"full":{},"stored":"PRE_ROPE","mean":true)" + codec,
                R"({"full":{},"stored":"NO_ROPE","mean":true)" + codec);
  const Loaded loaded = Load(model, {1, 2});
  for (const std::string side : {"k_proj", "v_proj"}) {
    const auto basis = Tensor(model, side + ".basis.weight", 32);  // [24, 32]
    const auto mean = Tensor(model, side + ".basis.mean", 1);
    const PartWeights& part =
        side == "k_proj" ? loaded.layer().key[0] : loaded.layer().value;
    EXPECT_EQ(part.basis.k, 32);
    EXPECT_EQ(part.basis.n, 24);
    ExpectColumns(part.basis, 0, basis);
    for (size_t r = 0; r < 24; ++r) {
      double sum = 0;
      for (size_t c = 0; c < 32; ++c) {
        sum -=
            static_cast<double>(basis[r][c]) * static_cast<double>(mean[c][0]);
      }
      EXPECT_FLOAT_EQ(part.basis_bias.device_address()[r],
                      static_cast<float>(sum));
      // This rank's KV heads 2 and 3 are columns 16 to 31.
      for (size_t i = 0; i < 16; ++i) {
        const float lift =
            side == "k_proj"
                ? part.up[i / 8].device_address()[i % 8 * 24 + r]
                : Element(part.lift[i / 8], static_cast<int64_t>(r),
                          static_cast<int64_t>(i % 8));
        ASSERT_EQ(lift, basis[r][16 + i]);
      }
    }
    for (size_t i = 0; i < 8; ++i) {
      if (side == "k_proj") {
        EXPECT_EQ(part.up_bias.device_address()[8 + i], mean[24 + i][0]);
      } else {  // this rank's query heads 4..7
        EXPECT_EQ(part.lift_bias.device_address()[i], mean[16 + i][0]);
        EXPECT_EQ(part.lift_bias.device_address()[24 + i], mean[24 + i][0]);
      }
    }
    EXPECT_EQ(part.range_minimum.device_address()[23], -3.0f);
    EXPECT_EQ(part.range_scale.device_address()[0],
              2.0f);  // 6 / (4 - 1): 4 codes for a range of 6
  }
}

TEST(AttentionWeightsTest, TheWeightTilesDependOnTheTensorsThatThePlanNeeds) {
  const Model plain = MakeModel(kFullKey, kFullValue);
  const Model low = MakeModel(kFullKey, LowRank("fold", "NO_ROPE"));
  RandomSource shape(TinyShape(), 1, DType::kBf16);
  EXPECT_EQ(plain.source->WeightTiles(), shape.WeightTiles());
  EXPECT_NE(low.source->WeightTiles(), shape.WeightTiles());
}

}  // namespace
}  // namespace kvasir::worker
