// Kernels access the memory that words and the table of buffers give them. So words must agree with
// the buffers by the same rules as in Python; `tpc_rules.h` is generated from these.
#include "checks.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>

#include "tpc_rules.h"

namespace tpc {
namespace {

thread_local char refusal[512];

struct Refused {};

[[gnu::format(printf, 2, 3)]] void require(bool good, const char* format, ...) {
  if (good) return;
  va_list values;
  va_start(values, format);
  std::vsnprintf(refusal, sizeof refusal, format, values);
  va_end(values);
  throw Refused{};
}

using Integer = long long;  // for printf

int64_t itemsize(int64_t dtype) {
  if (dtype == TPC_DTYPE_I8 || dtype == TPC_DTYPE_F8_E4M3) return 1;
  if (dtype == TPC_DTYPE_BF16 || dtype == TPC_DTYPE_F16) return 2;
  return dtype == TPC_DTYPE_F32 || dtype == TPC_DTYPE_I32 ? 4 : 0;
}

class Checker {
 public:
  Checker(const tpc_program& program, const Path& path, std::vector<Kernel>& kernels)
      : program_(program), path_(path), kernels_(kernels) {}

  void check() {
    const tpc_program& p = program_;
    require(p.words && p.buffers && p.weights && p.families && p.counters &&
                p.board && (p.totals || p.counter_count == 0),
            "an array is missing");
    require(p.queues > 0 && p.sharing > 0 && p.first_queue >= 0 && p.first_worker >= 0 &&
                int64_t{p.first_worker} + int64_t{p.queues} * p.sharing <= p.workers,
            "%d queues with %d workers each are not among %d workers", p.queues, p.sharing,
            p.workers);
    require(p.own_row >= 0 && p.own_row < p.counter_rows && p.counter_count <= p.counter_stride,
            "the counters of rank %lld are not in memory", static_cast<Integer>(p.own_row));
    for (int32_t buffer = 0; buffer < p.buffer_count; ++buffer)
      ranks_ = std::max(ranks_, p.buffers[buffer].rank + 1);
    check_list("queues", p.queue_offsets, p.first_queue, p.queues, p.queue_value_count);
    check_list("waits", p.wait_offsets, 0, p.instruction_count, p.wait_count);
    check_list("signals", p.signal_offsets, 0, p.instruction_count, p.signal_count);
    for (int32_t wait = 0; wait < p.wait_count; ++wait) {
      const int32_t counter = counter_in("waits", p.wait_values[2 * wait]);
      const int32_t until = p.wait_values[2 * wait + 1];
      require(std::abs(until) <= p.totals[counter], "waits: %d of %d signals of counter %d",
              until, p.totals[counter], counter);
    }
    for (int32_t signal = 0; signal < p.signal_count; ++signal)
      counter_in("signals", p.signal_values[signal]);
    kernels_.assign(static_cast<size_t>(p.instruction_count), nullptr);
    const int32_t* edges = p.queue_offsets + p.first_queue;
    for (int32_t place = edges[0]; place < edges[p.queues]; ++place) {
      number_ = p.queue_values[place];
      require(number_ >= 0 && number_ < p.instruction_count,
              "queues: instruction %d of %d instructions", number_, p.instruction_count);
      kernels_[static_cast<size_t>(number_)] =
          checked_kernel(p.words + int64_t{number_} * TPC_ROW_WORDS);
    }
  }

 private:
  static void check_list(const char* name, const int32_t* offsets, int32_t first, int32_t count,
                         int32_t size) {
    require(offsets != nullptr, "%s: no offsets", name);
    for (int32_t part = first; part < first + count; ++part)
      require(offsets[part] >= 0 && offsets[part] <= offsets[part + 1] && offsets[part + 1] <= size,
              "%s: the part %d:%d of %d values", name, offsets[part], offsets[part + 1], size);
  }

  int32_t counter_in(const char* name, int32_t counter) const {
    require(counter >= 0 && counter < program_.counter_count, "%s: counter %d of %d counters", name,
            counter, program_.counter_count);
    return counter;
  }

  Kernel checked_kernel(const int32_t* words) {
    const int32_t opcode = words[0];
    require(kernel_for(path_, opcode, {}), "instruction %d: the opcode %d has no kernel", number_,
            opcode);
    dtypes_ = {};
    std::copy(words, words + TPC_ROW_WORDS, values_);
    std::fill(values_ + TPC_ROW_WORDS, values_ + TPC_ROW_WORDS + TPC_FREE_NAMES, 0);
    values_[TPC_ROW_WORDS] = ranks_;
    for (const tpc_rule& rule : tpc_rules)
      if (rule.opcode == opcode && values_[rule.when] == rule.value &&
          !(rule.optional && values_[rule.word] == TPC_NONE))
        check_rule(rule);
    const Kernel kernel = kernel_for(path_, opcode, dtypes_);
    require(kernel,
            "instruction %d: the opcode %d has no kernel for the dtypes %lld of values, %lld of "
            "weights, %lld of norms and biases, %lld of the cache",
            number_, opcode, static_cast<Integer>(dtypes_.values),
            static_cast<Integer>(dtypes_.weight), static_cast<Integer>(dtypes_.vectors),
            static_cast<Integer>(dtypes_.cache));
    return kernel;
  }

  void check_rule(const tpc_rule& rule) {
    const int64_t value = values_[rule.word];
    switch (rule.kind) {
      case TPC_RULE_LEAST:
        return expect(rule, value >= rule.other, "at least", rule.other);
      case TPC_RULE_BUFFER:
        return check_buffers(rule);
      case TPC_RULE_ABSENT:
        return expect(rule, value == TPC_NONE, "equal to", TPC_NONE);
      case TPC_RULE_MOST:
        return expect(rule, value <= limit(rule), "at most", limit(rule));
      case TPC_RULE_EXACTLY: {  // the terms from `other` on are another number that is allowed
        const int64_t number = limit(rule, 0, rule.other);
        const bool is_other = rule.other < rule.count && value == limit(rule, rule.other, rule.count);
        return expect(rule, value == number || is_other, "equal to", number);
      }
      case TPC_RULE_RANGE: {
        const int64_t stop = values_[rule.word + 1], least = rule.other ? values_[rule.other] : 1;
        expect(rule, value >= 0, "at least", 0);
        require(stop <= limit(rule) && stop - value >= std::max(least, int64_t{1}),
                "instruction %d: %s is %lld:%lld, expected a part of 0:%lld", number_, rule.name,
                static_cast<Integer>(value), static_cast<Integer>(stop),
                static_cast<Integer>(limit(rule)));
        return;
      }
      case TPC_RULE_FORMAT: {
        const int64_t wanted = program_.buffers[values_[rule.other]].format;
        return expect(rule, value == wanted, "equal to", wanted);
      }
      case TPC_RULE_ALIKE: {
        const char* operand = std::strchr(rule.name, '.');
        const int64_t first = alike_.try_emplace(operand, value).first->second;
        return expect(rule, value == first, "equal to", first);
      }
    }
  }

  void expect(const tpc_rule& rule, bool good, const char* how, int64_t wanted) const {
    require(good, "instruction %d: %s is %lld, expected a number %s %lld", number_, rule.name,
            static_cast<Integer>(values_[rule.word]), how, static_cast<Integer>(wanted));
  }

  // A buffer of the instruction's rank, or one of each rank.
  void check_buffers(const tpc_rule& rule) {
    const int64_t rank = values_[1], count = rule.each_rank ? ranks_ : 1;
    const int64_t first = rule.word ? values_[rule.word] : only(rule.role, rank);
    require(first >= 0 && count <= program_.buffer_count && first <= program_.buffer_count - count,
            "instruction %d: %s is buffer %lld of %d buffers", number_, rule.name,
            static_cast<Integer>(first), program_.buffer_count);
    for (int64_t place = 0; place < count; ++place)
      check_buffer(rule, first + place, rule.each_rank ? place : rank);
  }

  // The number of a rank's first buffer of a role, or -1.
  int64_t only(int32_t role, int64_t rank) const {
    for (int32_t buffer = 0; buffer < program_.buffer_count; ++buffer)
      if (program_.buffers[buffer].role == role && program_.buffers[buffer].rank == rank)
        return buffer;
    return -1;
  }

  void check_buffer(const tpc_rule& rule, int64_t number, int64_t rank) {
    const tpc_buffer& buffer = program_.buffers[number];
    const auto good = [&](bool is, const char* what) {
      require(is, "instruction %d: %s is buffer %lld, whose %s is wrong", number_, rule.name,
              static_cast<Integer>(number), what);
    };
    good(buffer.role == rule.role, "role");
    good(buffer.rank == rank, "rank");
    if (rule.dtype == 0 && dtype_of(rule) == 0) dtype_of(rule) = buffer.format;
    good(buffer.format == (rule.dtype ? rule.dtype : dtype_of(rule)) &&
             buffer.dtype == values_of(buffer.format) && itemsize(buffer.dtype),
         "dtype");
    // A cache may have layers without slots before the first launch, and there may be no states.
    const int64_t *extents = buffer.shape, *end = extents + rule.count;
    const bool is_state = buffer.role == TPC_ROLE_CACHE || buffer.role == TPC_ROLE_TAILS ||
                          buffer.role == TPC_ROLE_STATES;
    const bool empty = is_state && std::find(extents + 1, end, 0) != end;
    good((buffer.address > 0 || empty) && buffer.address % itemsize(buffer.dtype) == 0, "address");
    good(buffer.dims == rule.count, "number of dimensions");
    for (int32_t dim = 0; dim < rule.count; ++dim)
      good((empty && dim > 0 && extents[dim] == 0) || bind(extents[dim], rule.products[dim]), "shape");
    good(is_grouped(buffer) ? has_parts(buffer) : has_strides(buffer), "layout");
    if (rule.other) good(buffer.block == values_[rule.other], "block");
  }

  // The dtype of the instruction's buffers of this kind, 0 before the first one.
  int64_t& dtype_of(const tpc_rule& rule) {
    if (rule.role == TPC_ROLE_CACHE) return dtypes_.cache;
    if (rule.role != TPC_ROLE_WEIGHT) return dtypes_.values;
    return rule.count == 1 ? dtypes_.vectors : dtypes_.weight;
  }

  // The dtype of the values of a format.
  static int64_t values_of(int64_t format) {
    const bool words = kind_of(format) >= TPC_KIND_INT4 && kind_of(format) <= TPC_KIND_INT6;
    return words ? int64_t{TPC_DTYPE_I32} : kind_of(format);
  }

  static bool is_grouped(const tpc_buffer& buffer) {
    return buffer.role == TPC_ROLE_WEIGHT && buffer.format != buffer.dtype;
  }

  // Whether a weight of several components has all of them, in rows without gaps.
  static bool has_parts(const tpc_buffer& buffer) {
    constexpr int64_t kMost = int64_t{1} << 31, kGrain = 16;
    const int64_t rows = buffer.shape[0], columns = buffer.shape[1], first = buffer.first;
    const int64_t group = group_of(buffer.format), bits = bits_of(buffer.format);
    const bool supers = has_supers(buffer.format), minima = has_minima(buffer.format);
    const int64_t scale = supers ? 1 : minima ? 2 : itemsize(scales_of(buffer.format));
    if (first < 0 || first >= kMost || columns >= kMost || first % kGrain || !scale) return false;
    const int64_t words = bits < 8 ? (columns + 7) / 8 : columns;
    if ((rows > 1 && buffer.strides[0] != words) || buffer.strides[1] != 1) return false;
    const auto parts = [&](int64_t width) {
      return width ? (first + columns - 1) / width + 1 - first / width : 1;
    };
    const int64_t groups = parts(group);
    const auto fits = [&](int64_t address, int64_t row_bytes) {
      int64_t bytes = 0;
      return address > 0 && !__builtin_mul_overflow(rows, row_bytes, &bytes) &&
             bytes <= INT64_MAX - address;
    };
    // Whether a component is there, at a multiple of the size of its elements, or none is expected.
    const auto right = [&](int64_t address, bool expected, int64_t count, int64_t size) {
      return expected ? fits(address, count * size) && address % size == 0 : address == 0;
    };
    const bool high = bits == 5 || bits == 6;
    return fits(buffer.address, words * itemsize(buffer.dtype)) &&
           right(buffer.high, high, high ? parts(32 / (bits - 4)) : 0, 4) &&
           right(buffer.scales, true, groups, scale) &&
           right(buffer.offsets, has_offsets(buffer.format), groups, 1) &&
           right(buffer.minima, minima, groups, scale) &&
           right(buffer.super_scales, supers, parts(kSuper), 2) &&
           right(buffer.super_minima, supers && minima, parts(kSuper), 2);
  }

  // The bytes of the scale after the values of a row of the cache.
  static int64_t scale_bytes(const tpc_buffer& buffer) {
    const bool rounded = buffer.role == TPC_ROLE_CACHE && buffer.format != buffer.dtype;
    return rounded ? itemsize(scales_of(buffer.format)) : 0;
  }

  // Whether the strides are those of rows without gaps, of which no size overflows.
  static bool has_strides(const tpc_buffer& buffer) {
    constexpr int kOrder[] = TPC_CACHE_ORDER;
    int64_t step = itemsize(buffer.dtype);
    for (int64_t place = buffer.dims - 1; place >= 0; --place) {
      const int64_t dim = buffer.role == TPC_ROLE_CACHE ? kOrder[place] : place;
      if (buffer.shape[dim] > 1 && buffer.strides[dim] != step / itemsize(buffer.dtype))
        return false;
      if (__builtin_mul_overflow(step, std::max(buffer.shape[dim], int64_t{1}), &step)) return false;
      if (place == buffer.dims - 1 && __builtin_add_overflow(step, scale_bytes(buffer), &step))
        return false;
    }
    return step <= INT64_MAX - buffer.address;
  }

  // Whether an extent is this product. A name in it that is not bound becomes the quotient.
  bool bind(int64_t extent, const int32_t (&factors)[3]) {
    int32_t free = 0;
    const int64_t known = product(factors, &free);
    if (free == 0) return extent == known;
    if (known <= 0 || extent <= 0 || extent % known != 0) return false;
    values_[free] = extent / known;
    return true;
  }

  int64_t limit(const tpc_rule& rule) const { return limit(rule, 0, rule.count); }

  // The first of some terms less the others.
  int64_t limit(const tpc_rule& rule, int32_t first, int32_t last) const {
    int64_t difference = 0;
    for (int32_t term = first; term < last; ++term) {
      int32_t free = 0;
      const int64_t value = product(rule.products[term], &free);
      if (free || __builtin_add_overflow(difference, term > first ? -value : value, &difference))
        return INT64_MIN;
    }
    return difference;
  }

  // A product without its name that is not bound; 0 if it is too large.
  int64_t product(const int32_t (&factors)[3], int32_t* free) const {
    int64_t known = 1;
    for (const int32_t factor : factors) {
      if (factor == 0) continue;
      const int64_t value = factor < 0 ? -int64_t{factor} : values_[factor];
      if (factor >= TPC_ROW_WORDS && value == 0) {
        *free = factor;
      } else if (__builtin_mul_overflow(known, value, &known)) {
        return 0;
      }
    }
    return known;
  }

  const tpc_program& program_;
  const Path& path_;
  std::vector<Kernel>& kernels_;
  int32_t number_ = 0;                                // of the instruction
  Dtypes dtypes_{};                                   // of its buffers
  int64_t ranks_ = 0;                                 // of the program
  std::map<std::string_view, int64_t> alike_;         // by operand, of the program
  int64_t values_[TPC_ROW_WORDS + TPC_FREE_NAMES]{};  // of words and of free names
};

}  // namespace

bool refuses(const tpc_program* program, const Path* path, std::vector<Kernel>& kernels) {
  refusal[0] = 0;
  try {
    require(path != nullptr && runs_here(*path), "the path does not run here");
    Checker(*program, *path, kernels).check();
  } catch (const Refused&) {
    return true;
  }
  return false;
}

}  // namespace tpc

extern "C" const char* tpc_refusal() { return tpc::refusal; }
