// Runs dumped programs without Python, so that it can be built with sanitizers: `driver DUMP...`. It
// has the kernels of one vector path, which `TPC_KERNELS` returns.
//
// A dump is a sequence of sections, each a number of bytes and then the bytes: see `dump.py`. Each
// buffer has an allocation of its own size, so that an access beside it is found.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "interface.h"

namespace {

using Bytes = std::vector<char>;

Bytes section(std::ifstream& file) {
  int64_t size = 0;
  file.read(reinterpret_cast<char*>(&size), sizeof size);
  Bytes bytes(static_cast<size_t>(size));
  file.read(bytes.data(), size);
  if (!file) throw std::runtime_error("the dump is too short");
  return bytes;
}

template <class T>
std::vector<T> values(std::ifstream& file) {
  const Bytes bytes = section(file);
  std::vector<T> numbers(bytes.size() / sizeof(T));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

template <class T>
int32_t count(const std::vector<T>& values) {
  return static_cast<int32_t>(values.size());
}

struct alignas(64) Line {
  char bytes[64];
};

struct Header {
  int64_t counters, queues, sharing, launches, steps;
};

template <class T>
double number(const Bytes& bytes, size_t place) {
  T value;
  std::memcpy(&value, bytes.data() + place * sizeof value, sizeof value);
  return static_cast<double>(value);
}

// The number at a place of a buffer.
double number(const Bytes& bytes, int64_t dtype, size_t place) {
  if (dtype == TPC_DTYPE_I32) return number<int32_t>(bytes, place);
  if (dtype == TPC_DTYPE_F32) return number<float>(bytes, place);
  if (dtype == TPC_DTYPE_F16) return number<_Float16>(bytes, place);
  char wide[sizeof(float)] = {};  // bf16: the upper half of a float
  std::memcpy(wide + 2, bytes.data() + place * 2, 2);
  float value;
  std::memcpy(&value, wide, sizeof value);
  return static_cast<double>(value);
}

// The largest difference over the largest value. NaN must be in the same places.
double error(const Bytes& results, const Bytes& wanted, int64_t dtype) {
  const size_t count = results.size() / (dtype == TPC_DTYPE_BF16 || dtype == TPC_DTYPE_F16 ? 2 : 4);
  double worst = 0, most = 0;
  for (size_t place = 0; place < count; ++place) {
    const double value = number(results, dtype, place), expected = number(wanted, dtype, place);
    if (std::isnan(value) != std::isnan(expected)) return std::numeric_limits<double>::infinity();
    if (std::isnan(value)) continue;
    worst = std::fmax(worst, std::fabs(value - expected));
    most = std::fmax(most, std::fabs(expected));
  }
  return worst == 0 ? 0 : worst / most;
}

class Dump {
 public:
  explicit Dump(const char* name) : file_(name, std::ios::binary) {
    if (!file_) throw std::runtime_error("the dump cannot be opened");
    header_ = values<Header>(file_).at(0);
    words_ = values<int32_t>(file_);
    for (std::vector<int32_t>& list : lists_) list = values<int32_t>(file_);
    const std::vector<int64_t> first = values<int64_t>(file_);  // see `first_weights`
    families_ = values<int32_t>(file_);
    table_ = values<tpc_buffer>(file_);
    for (tpc_buffer& row : table_) {
      memory_.push_back(section(file_));
      row.address = reinterpret_cast<int64_t>(memory_.back().data());
      for (int64_t* part : {&row.high, &row.scales, &row.offsets, &row.minima, &row.super_scales,
                            &row.super_minima}) {
        if (*part == 0) continue;
        parts_.push_back(section(file_));
        *part = reinterpret_cast<int64_t>(parts_.back().data());
      }
    }
    for (size_t place = 0; place < first.size(); place += 3)
      weights_.push_back(
          first[place] == TPC_NONE
              ? 0
              : table_[static_cast<size_t>(first[place])].address + first[place + 1]);
    counters_.resize(static_cast<size_t>(header_.counters));
  }

  // Run all launches, and return whether each leaves the values of the dump behind.
  bool run(uint64_t delays) {
    const auto workers = static_cast<size_t>(header_.queues * header_.sharing);
    const std::unique_ptr<Line[]> board(new Line[1 + workers]());
    const tpc_program program{words_.data(),
                              table_.data(),
                              lists_[0].data(),
                              lists_[1].data(),
                              lists_[2].data(),
                              lists_[3].data(),
                              lists_[4].data(),
                              lists_[5].data(),
                              lists_[6].data(),
                              weights_.data(),
                              families_.data(),
                              counters_.data(),
                              board.get(),
                              1,
                              header_.counters,
                              0,
                              count(table_),
                              count(words_) / TPC_ROW_WORDS,
                              count(lists_[6]),
                              count(lists_[1]),
                              count(lists_[3]) / 2,
                              count(lists_[5]),
                              0,
                              static_cast<int32_t>(header_.queues),
                              static_cast<int32_t>(header_.sharing),
                              0,
                              static_cast<int32_t>(workers),
                              60.0,
                              delays};
    void* machine = tpc_open(&program, TPC_KERNELS());
    if (machine == nullptr) throw std::runtime_error(tpc_refusal());
    bool good = true;
    for (int64_t launch = 0; launch < header_.launches; ++launch) {
      for (size_t buffer = 0; buffer < table_.size(); ++buffer)
        if (table_[buffer].role == TPC_ROLE_CLOCK)
          std::memset(memory_[buffer].data(), 0, memory_[buffer].size());
      tpc_launch(machine, header_.steps, nullptr);
      while (!tpc_wait(machine, 100, INT64_MAX)) {
      }
      const int64_t done = tpc_end(machine);
      if (done != header_.steps) {
        std::printf("launch %lld: %lld steps, -1 after a wait that was too long\n",
                    static_cast<long long>(launch), static_cast<long long>(done));
        good = false;
      }
      good &= compare(launch);
    }
    tpc_close(machine);
    return good;
  }

 private:
  bool compare(int64_t launch) {
    bool good = true;
    const double tolerance = values<double>(file_).at(0);
    for (const int32_t buffer : values<int32_t>(file_)) {
      const auto place = static_cast<size_t>(buffer);
      const int64_t dtype = table_[place].dtype;
      const double difference = error(memory_[place], section(file_), dtype);
      if (difference <= (dtype == TPC_DTYPE_I32 ? 0.0 : tolerance)) continue;
      std::printf("launch %lld: buffer %d is wrong, error %g\n", static_cast<long long>(launch),
                  buffer, difference);
      good = false;
    }
    return good;
  }

  std::ifstream file_;
  Header header_;
  std::vector<int32_t> words_, families_;
  std::vector<int32_t> lists_[7];  // queues, waits and signals as offsets and values; totals
  std::vector<tpc_buffer> table_;
  std::vector<Bytes> memory_, parts_;  // values, and the other components of weights
  std::vector<int64_t> counters_, weights_;
};

}  // namespace

int main(int count, char** arguments) {
  int wrong = 0;
  for (int place = 1; place < count; ++place)
    for (const uint64_t delays : {0, 1}) {
      Dump dump(arguments[place]);
      const bool good = dump.run(delays);
      std::printf("%s delays %d: %s\n", arguments[place], static_cast<int>(delays),
                  good ? "right" : "WRONG");
      wrong += !good;
    }
  return wrong == 0 ? 0 : 1;
}
