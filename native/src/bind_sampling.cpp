// Sampling as the class Sampler of the Python module.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bind.h"
#include "sampling.h"

namespace nb = nanobind;

namespace giveway {

namespace {

using LogitArray = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
template <typename T>
using Column = std::vector<T>;  // made of a Python list, which is faster than making an array of it there
using Numbers = std::vector<int64_t>;

LogitRows rows_of(const LogitArray& logits) {
  const bool is_contiguous = logits.shape(0) == 0 || logits.shape(1) == 1 || logits.stride(1) == 1;
  require(logits.shape(1) > 0 && is_contiguous,
          "logits must be [rows, vocab] with at least one value in a row, and each row contiguous");
  return {logits.data(), logits.stride(0), static_cast<int64_t>(logits.shape(0)),
          static_cast<int64_t>(logits.shape(1))};
}

void require_one_for_each_row(const char* name, size_t count, const LogitRows& logits) {
  if (static_cast<int64_t>(count) == logits.num_rows) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(count) + " elements for " +
                              std::to_string(logits.num_rows) + " rows of logits");
}

template <typename T>
const T* checked(const char* name, const Column<T>& column, const LogitRows& logits) {
  require_one_for_each_row(name, column.size(), logits);
  return column.data();
}

// Lists of numbers, one behind the other, out of a Python list of sequences; None: all are empty.
template <typename T>
struct Flattened {
  std::vector<int64_t> offsets;
  std::vector<T> values;

  Flattened(const char* name, nb::handle lists, const LogitRows& logits) {
    if (lists.is_none()) return;
    const nb::list rows = nb::cast<nb::list>(lists);
    require_one_for_each_row(name, rows.size(), logits);
    offsets.push_back(0);
    for (nb::handle row : rows) {
      const nb::object items = nb::steal(PySequence_Fast(row.ptr(), "token ids must be a sequence"));
      if (!items.is_valid()) throw nb::python_error();
      PyObject* const* const first = PySequence_Fast_ITEMS(items.ptr());
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
      for (Py_ssize_t i = 0; i < count; ++i) values.push_back(value_of(first[i]));
      offsets.push_back(static_cast<int64_t>(values.size()));
    }
  }

  TokenLists lists() const { return {offsets.empty() ? nullptr : offsets.data(), values.data()}; }

 private:
  static T value_of(PyObject* item);
};

template <>
int64_t Flattened<int64_t>::value_of(PyObject* item) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(item, &overflow);  // -1 if it does: an id that no vocabulary has
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

template <>
double Flattened<double>::value_of(PyObject* item) {
  const double value = PyFloat_AsDouble(item);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// The masks of all rows, one behind the other, out of a Python list of bytes; None in it: the row has no mask. None for
// the list: no row has one. Bit `token % 8` of byte `token / 8` is bit `token % 32` of a word, since processors that
// run this store the lowest byte of a word first.
struct GatheredMasks {
  std::vector<TokenMasks::Row> rows;
  std::vector<uint32_t> words;

  GatheredMasks(nb::handle masks, const LogitRows& logits) {
    if (masks.is_none()) return;
    const nb::list list = nb::cast<nb::list>(masks);
    require_one_for_each_row("allowed", list.size(), logits);
    for (nb::handle mask : list) {
      if (mask.is_none()) {
        rows.push_back({-1, 0});
        continue;
      }
      const nb::bytes bytes = nb::cast<nb::bytes>(mask);
      const size_t start = words.size(), num_words = (bytes.size() + sizeof(uint32_t) - 1) / sizeof(uint32_t);
      words.resize(start + num_words);
      if (num_words > 0) std::memcpy(words.data() + start, bytes.c_str(), bytes.size());
      rows.push_back({static_cast<int64_t>(start), static_cast<int64_t>(num_words)});
    }
  }

  TokenMasks masks() const { return {rows.empty() ? nullptr : rows.data(), words.data()}; }
};

// What the arithmetic relies on: without it there might be no largest logit, or no mass. SamplingParams is stricter.
void require_sense(const RowWishes& wishes, const std::vector<double>& biases, int64_t num_rows) {
  constexpr double kMost = 1e9;
  const auto is_small = [](double value) { return std::abs(value) <= kMost; };
  for (int64_t row = 0; row < num_rows; ++row) {
    const bool makes_sense = wishes.temperature[row] >= 0 && wishes.top_p[row] > 0 && wishes.min_p[row] >= 0 &&
                             wishes.min_p[row] <= 1 && wishes.repetition_penalty[row] > 0 &&
                             is_small(wishes.repetition_penalty[row]) && is_small(wishes.presence_penalty[row]) &&
                             is_small(wishes.frequency_penalty[row]);  // NaN never does
    if (!makes_sense) throw std::invalid_argument("row " + std::to_string(row) + ": a wish is out of its range");
  }
  require(std::all_of(biases.begin(), biases.end(), is_small), "a bias is out of its range");
}

// Memory for the log-probabilities of a batch.
struct LogprobMemory {
  std::vector<double> logprob;
  std::vector<int64_t> rank;
  std::vector<int64_t> top_tokens;
  std::vector<double> top_logprobs;
  int64_t max_top;

  LogprobMemory(int64_t num_rows, int64_t max_top)
      : logprob(num_rows),
        rank(num_rows),
        top_tokens(num_rows * max_top),
        top_logprobs(num_rows * max_top),
        max_top(max_top) {}

  LogprobRows rows() { return {logprob.data(), rank.data(), top_tokens.data(), top_logprobs.data(), max_top}; }

  // (logprob, rank, ((token, logprob), ...)) of one row.
  nb::tuple entry(int64_t row, int64_t num_top) const {
    nb::list top;
    for (int64_t i = row * max_top; i < row * max_top + num_top; ++i) {
      top.append(nb::make_tuple(top_tokens[i], top_logprobs[i]));
    }
    return nb::make_tuple(logprob[row], rank[row], nb::tuple(top));
  }
};

// Threads, and the memory that they work in.
class Sampler {
 public:
  explicit Sampler(int64_t num_threads) : num_threads_(checked_threads(num_threads)) {}

  std::pair<Numbers, Numbers> choose_largest(const LogitArray& array) const {
    const LogitRows logits = rows_of(array);
    Numbers tokens(logits.num_rows), num_wrong(logits.num_rows);
    {
      const nb::gil_scoped_release released;
      giveway::choose_largest(logits, num_threads_, tokens.data(), num_wrong.data());
    }
    return {std::move(tokens), std::move(num_wrong)};
  }

  nb::tuple choose_tokens(const LogitArray& array, const Column<double>& temperature, const Column<double>& top_p,
                          const Column<int64_t>& top_k, const Column<double>& min_p,
                          const Column<double>& repetition_penalty, const Column<double>& presence_penalty,
                          const Column<double>& frequency_penalty, const Column<uint64_t>& seed,
                          const Column<uint64_t>& output_index, const Column<int64_t>& num_logprobs,
                          nb::handle forbidden, nb::handle allowed, nb::handle biased, nb::handle biases,
                          nb::handle prompt, nb::handle output) {
    const LogitRows logits = rows_of(array);
    const Flattened<int64_t> forbidden_ids("forbidden", forbidden, logits), biased_ids("biased", biased, logits),
        prompt_ids("prompt", prompt, logits), output_ids("output", output, logits);
    const GatheredMasks masks(allowed, logits);
    const Flattened<double> bias_values("biases", biases, logits);
    require(bias_values.offsets == biased_ids.offsets, "biased and biases differ in length");
    const RowWishes wishes{checked("temperature", temperature, logits),
                           checked("top_p", top_p, logits),
                           checked("min_p", min_p, logits),
                           checked("repetition_penalty", repetition_penalty, logits),
                           checked("presence_penalty", presence_penalty, logits),
                           checked("frequency_penalty", frequency_penalty, logits),
                           checked("top_k", top_k, logits),
                           checked("num_logprobs", num_logprobs, logits),
                           checked("seed", seed, logits),
                           checked("output_index", output_index, logits),
                           forbidden_ids.lists(),
                           masks.masks(),
                           biased_ids.lists(),
                           bias_values.values.data(),
                           prompt_ids.lists(),
                           output_ids.lists()};
    require_sense(wishes, bias_values.values, logits.num_rows);
    int64_t most = -1;
    for (int64_t row = 0; row < logits.num_rows; ++row) most = std::max(most, wishes.num_logprobs[row]);
    LogprobMemory logprobs(most < 0 ? 0 : logits.num_rows, std::clamp<int64_t>(most, 0, logits.vocab));
    Numbers tokens(logits.num_rows), num_wrong(logits.num_rows);
    std::byte* const scratch = scratch_for(logits);
    {
      const nb::gil_scoped_release released;
      giveway::choose_tokens(logits, wishes, num_threads_, scratch, tokens.data(), num_wrong.data(), logprobs.rows());
    }
    nb::list entries;
    for (int64_t row = 0; row < logits.num_rows; ++row) {
      const int64_t wanted = wishes.num_logprobs[row];
      if (tokens[row] < 0 || wanted < 0) {
        entries.append(nb::none());
      } else {
        entries.append(logprobs.entry(row, std::min(wanted, logits.vocab)));
      }
    }
    return nb::make_tuple(std::move(tokens), std::move(num_wrong), entries);
  }

  std::pair<Numbers, nb::list> score_tokens(const LogitArray& array, const Column<int64_t>& tokens, int64_t num_top) {
    const LogitRows logits = rows_of(array);
    const int64_t* const chosen = checked("tokens", tokens, logits);
    for (int64_t row = 0; row < logits.num_rows; ++row) {
      if (chosen[row] >= 0 && chosen[row] < logits.vocab) continue;
      throw std::invalid_argument("token id " + std::to_string(chosen[row]) + " is outside the vocabulary of " +
                                  std::to_string(logits.vocab));
    }
    require(num_top >= 0, "num_top is " + std::to_string(num_top) + "; at least 0 is needed");
    LogprobMemory logprobs(logits.num_rows, std::min(num_top, logits.vocab));
    Numbers num_wrong(logits.num_rows);
    std::byte* const scratch = scratch_for(logits);
    {
      const nb::gil_scoped_release released;
      giveway::score_tokens(logits, chosen, num_threads_, scratch, num_wrong.data(), logprobs.rows());
    }
    nb::list entries;
    for (int64_t row = 0; row < logits.num_rows; ++row) {
      if (num_wrong[row] > 0) {
        entries.append(nb::none());
      } else {
        entries.append(logprobs.entry(row, logprobs.max_top));
      }
    }
    return {std::move(num_wrong), entries};
  }

 private:
  std::byte* scratch_for(const LogitRows& logits) {
    const size_t needed = num_threads_ * sampling_scratch_bytes(logits.vocab);
    if (needed > scratch_bytes_) {
      scratch_.reset(new std::byte[needed]);  // not make_unique: it would write to all of it
      scratch_bytes_ = needed;
    }
    return scratch_.get();
  }

  int num_threads_;
  std::unique_ptr<std::byte[]> scratch_;
  size_t scratch_bytes_ = 0;
};

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler",
                      "Chooses the tokens of whole batches on up to num_threads threads. Not for two calls at a time: "
                      "they would share its memory.")
      .def(nb::init<int64_t>(), nb::arg("num_threads"))
      .def("choose_largest", &Sampler::choose_largest, array_arg("logits"),
           "logits: float32 [rows, vocab]. Returns the token of the first of the largest logits of every row, and how "
           "many logits of every row are NaN or infinite; where there are any the token is -1.")
      .def("choose_tokens", &Sampler::choose_tokens, array_arg("logits"), nb::kw_only(), nb::arg("temperature"),
           nb::arg("top_p"), nb::arg("top_k"), nb::arg("min_p"), nb::arg("repetition_penalty"),
           nb::arg("presence_penalty"), nb::arg("frequency_penalty"), nb::arg("seed"), nb::arg("output_index"),
           nb::arg("num_logprobs"), nb::arg("forbidden").none(), nb::arg("allowed").none(), nb::arg("biased").none(),
           nb::arg("biases").none(), nb::arg("prompt").none(), nb::arg("output").none(),
           "The fields of SampleInput, each a list with an element for every row (num_logprobs: -1 for none), then "
           "lists with a sequence for every row, or None where all are empty; biases belong to the ids in biased, and "
           "allowed holds bytes, or None for a row without a mask. "
           "Returns lists with an element for every row: the token, -1 where there is none; how many logits are NaN or "
           "infinite, 0 where every token is forbidden; and (logprob, rank, ((token, logprob), ...)), or None.")
      .def("score_tokens", &Sampler::score_tokens, array_arg("logits"), nb::arg("tokens"), nb::arg("num_top"),
           "tokens: one for every row. Returns how many logits of every row are NaN or infinite, and (logprob, rank, "
           "((token, logprob), ...)) of the row's token and of the num_top best, or None where there are any.");
}

}  // namespace giveway
