// Every kernel that shares its work, called by one thread, by several, and from a tape by a team
// that stays together; `make sanitize` runs this under ThreadSanitizer. Says so and returns 1 where
// several threads write something else than one does. If a file is named, one round is enough and
// what was computed is written there, to be compared with that of another processor.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

#define KERNEL(NAME) extern "C" int64_t mistralrs_##NAME##_words(const int64_t*);
KERNEL(draw)
KERNEL(embedding_rows)
KERNEL(gated)
KERNEL(linear)
KERNEL(logprobs)
KERNEL(lora)
KERNEL(paged_attention)
KERNEL(rms_norm)
KERNEL(rope_table)
KERNEL(rotate_and_store)
KERNEL(scale)
KERNEL(search_affine)
KERNEL(search_symmetric)
KERNEL(search_zero)
KERNEL(softcap)
KERNEL(tape_run)

namespace {

constexpr int THREADS = 3, ROUNDS = 20;
constexpr int64_t ROWS = 48, SIZE = 1024, HEAD_DIM = 64, HEADS = SIZE / HEAD_DIM, RANK = 16;
constexpr int64_t BLOCK_SIZE = 16, BLOCKS = 64;  // one sequence fills the cache
constexpr int64_t F16 = 1, Q4_0 = 2, Q4_0_BYTES = 18, VOCAB = 40000;
// all types of weights, for products with few outputs
constexpr int64_t TYPES[] = {F16, Q4_0, 3, 6, 7, 8, 10, 11, 12, 13, 14, 264}, NARROW = 80;
constexpr int64_t NUM_TYPES = sizeof TYPES / sizeof *TYPES;

struct Call {
  const char* name;
  int64_t (*function)(const int64_t*);
  std::vector<int64_t> words;
  size_t threads;  // which word says how many
};

template <class T>
int64_t word(T value) {
  if constexpr (std::is_pointer_v<T>) {
    return (int64_t)(intptr_t)value;
  } else if constexpr (std::is_floating_point_v<T>) {
    const double wide = value;
    int64_t bits;
    std::memcpy(&bits, &wide, sizeof bits);
    return bits;
  } else {
    return value;
  }
}

// Stands for the number of threads among the arguments.
struct Threads {};

template <class... T>
Call make(const char* name, int64_t (*function)(const int64_t*), T... arguments) {
  Call call{name, function, {}, 0};
  const auto add = [&](auto argument) {
    if constexpr (std::is_same_v<decltype(argument), Threads>) {
      call.threads = call.words.size();
      call.words.push_back(0);
    } else {
      call.words.push_back(word(argument));
    }
  };
  (add(arguments), ...);
  return call;
}

// Numbers between -1 and 1, the same in each run.
std::vector<float> numbers(int64_t count) {
  static uint32_t state = 1;
  std::vector<float> made(count);
  for (float& x : made) {
    state = state * 1664525 + 1013904223;
    x = float(state >> 8) * 0x1p-23f - 1.0f;
  }
  return made;
}

std::vector<uint8_t> bytes(int64_t count) {
  std::vector<uint8_t> made(count);
  for (int64_t i = 0; i < count; i++)  // of either sign, and no two of them make a large float16
    made[i] = uint8_t(i * 37 % 48 + (i * i % 7 > 3 ? 128 : 0));
  return made;
}

struct Draw {  // as in sampling.cpp
  double temperature, top_p, min_p, u, repetition;
  int64_t top_k, loss_ids, losses, num_losses, seen, num_seen, gain_ids, gains, num_gains;
};

// What the calls read, and the outputs in which they are compared.
struct Data {
  std::vector<float> x = numbers(ROWS * SIZE), inputs = numbers(ROWS * SIZE),
                     gates = numbers(2 * ROWS * SIZE), weight = numbers(SIZE),
                     frequencies = numbers(HEAD_DIM / 2), scores = numbers(ROWS * VOCAB),
                     ones = std::vector<float>(ROWS * SIZE, 1.0f);
  std::vector<uint8_t> halves = bytes(2 * SIZE * SIZE),
                       quarters = bytes(SIZE * SIZE / 32 * Q4_0_BYTES);
  std::vector<float> k_cache = numbers(BLOCKS * BLOCK_SIZE * SIZE),
                     v_cache = numbers(BLOCKS * BLOCK_SIZE * SIZE), k, v, q, cosines, sines;
  std::vector<int64_t> positions, slots, tokens, lines;
  std::vector<int32_t> table, query_start{0, int32_t(ROWS)}, one_row{0, 1},
      lengths{int32_t(BLOCKS * BLOCK_SIZE)};
  std::vector<Draw> draws{ROWS, Draw{1, 1, 0, 0.5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
  std::vector<int64_t> low_rank, layers, spans;
  std::vector<float> normed, activated, multiplied, looked_up, attended, searched, searched_too,
      added, scaled, capped;
  std::vector<float> narrow[NUM_TYPES];
  std::vector<double> drawn, shares;

  Data() {
    const std::vector<float> empty(ROWS * SIZE);
    k = v = q = cosines = sines = normed = activated = multiplied = looked_up = attended = empty;
    searched = searched_too = added = scaled = capped = empty;
    for (auto& values : narrow) values.resize(ROWS * NARROW);
    drawn.resize(2 * ROWS);
    shares.resize(5 * ROWS);
    for (int64_t i = 0; i < ROWS; i++) {
      positions.push_back(i);
      slots.push_back(5 * i);
      tokens.push_back(7 * i);
      lines.push_back(ROWS - 1 - i);
      draws[i].top_k = i % 3 * 20;
      draws[i].top_p = i % 2 ? 0.7 : 1.0;
    }
    for (int32_t i = 0; i < BLOCKS; i++) table.push_back(BLOCKS - 1 - i);
    low_rank = {SIZE, RANK, word(halves.data()), 1, 0, RANK, 0, SIZE, word(halves.data())};
    layers = {word(low_rank.data())};
    spans = {1, 0, ROWS, word(layers.data())};
  }

  // What calls change is as it was at the first time.
  void begin() {
    q = k = v = x;
    added = scaled = capped = inputs;
  }

  std::vector<Call> calls() {
    const Threads threads;
    const int64_t groups = ROWS * SIZE / 32;
    std::vector<Call> made{
        make("rms_norm", mistralrs_rms_norm_words, x.data(), SIZE, nullptr_float(), int64_t(0),
             weight.data(), 0.0, 1e-6, normed.data(), ROWS, int64_t(1), SIZE, threads),
        make("gated", mistralrs_gated_words, gates.data(), 2 * SIZE, activated.data(), ROWS, SIZE,
             int64_t(0), threads),
        make("scale", mistralrs_scale_words, scaled.data(), ROWS * SIZE, 0.5, threads),
        make("softcap", mistralrs_softcap_words, capped.data(), ROWS * SIZE, 2.0, threads),
        make("rope_table", mistralrs_rope_table_words, positions.data(), frequencies.data(), 1.0,
             cosines.data(), sines.data(), ROWS, HEAD_DIM / 2, threads),
        make("rotate_and_store", mistralrs_rotate_and_store_words, q.data(), SIZE, k.data(), SIZE,
             v.data(), SIZE, cosines.data(), sines.data(), slots.data(), ROWS, HEADS, threads,
             k_cache.data(), v_cache.data(), int64_t(0), BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM),
        make("paged_attention", mistralrs_paged_attention_words, q.data(), SIZE, attended.data(),
             ROWS, HEADS, 0.125, int64_t(0), 0.0, threads, k_cache.data(), v_cache.data(),
             int64_t(0), BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, table.data(), BLOCKS,
             query_start.data(), lengths.data(), int64_t(1)),
        // one row and one head, whose keys are divided
        make("paged_attention", mistralrs_paged_attention_words, q.data() + SIZE, SIZE,
             attended.data(), int64_t(1), int64_t(1), 0.125, int64_t(0), 0.0, threads,
             k_cache.data(), v_cache.data(), int64_t(0), BLOCKS, BLOCK_SIZE, int64_t(1), HEAD_DIM,
             table.data(), BLOCKS, one_row.data(), lengths.data(), int64_t(1)),
        make("linear", mistralrs_linear_words, Q4_0, attended.data(), SIZE, quarters.data(),
             nullptr_float(), multiplied.data(), SIZE, ROWS, int64_t(2), SIZE, SIZE, threads),
        make("linear", mistralrs_linear_words, F16, multiplied.data(), SIZE, halves.data(),
             nullptr_float(), normed.data(), SIZE, ROWS, int64_t(0), SIZE, SIZE, threads),
        make("lora", mistralrs_lora_words, inputs.data(), SIZE, added.data(), SIZE, spans.data(),
             int64_t(0), threads),
        make("embedding_rows", mistralrs_embedding_rows_words, Q4_0, quarters.data(),
             tokens.data(), looked_up.data(), ROWS, SIZE, SIZE, threads),
        make("draw", mistralrs_draw_words, scores.data(), VOCAB, ROWS, VOCAB, draws.data(),
             drawn.data(), threads),
        make("logprobs", mistralrs_logprobs_words, scores.data(), VOCAB, VOCAB, lines.data(),
             tokens.data(), ROWS, int64_t(2), -100.0, shares.data(), threads),
        make("search_affine", mistralrs_search_affine_words, inputs.data(), nullptr_float(),
             ones.data(), x.data(), ones.data(), searched.data(), searched_too.data(), groups,
             int64_t(32), int64_t(15), threads),
        make("search_symmetric", mistralrs_search_symmetric_words, inputs.data(), nullptr_float(),
             searched.data() + groups, 2 * groups, int64_t(4), threads),
        make("search_zero", mistralrs_search_zero_words, inputs.data(), ones.data(),
             searched_too.data() + groups, groups, int64_t(-128), int64_t(127), threads),
    };
    for (int64_t i = 0; i < NUM_TYPES; i++)
      made.push_back(make("linear", mistralrs_linear_words, TYPES[i], inputs.data(), SIZE,
                          halves.data(), nullptr_float(), narrow[i].data(), NARROW, ROWS,
                          int64_t(2), NARROW, SIZE, threads));
    return made;
  }

  template <class Look>
  void each_output(Look look) const {
    for (const auto* values : {&normed, &activated, &multiplied, &looked_up, &attended, &searched,
                               &searched_too, &added, &scaled, &capped, &q, &k, &cosines, &sines,
                               &k_cache, &v_cache})
      look(*values);
    for (const auto& values : narrow) look(values);
    look(drawn);
    look(shares);
  }

  // A number for the bits of all outputs.
  uint64_t outputs() const {
    uint64_t hash = 14695981039346656037u;
    each_output([&](const auto& values) {
      for (const auto value : values) hash = (hash ^ uint64_t(word(value))) * 1099511628211u;
    });
    return hash;
  }

  // How many values each output has, and these, all as doubles.
  bool write(const char* name) const {
    std::FILE* file = std::fopen(name, "wb");
    if (!file) return false;
    each_output([&](const auto& values) {
      std::vector<double> wide{double(values.size())};
      wide.insert(wide.end(), values.begin(), values.end());
      std::fwrite(wide.data(), sizeof(double), wide.size(), file);
    });
    return !std::fclose(file);
  }

  static const float* nullptr_float() { return nullptr; }
};

template <class... Words>
int fail(const char* format, Words... words) {
  std::printf(format, words...);
  std::puts(" than with one thread");
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  Data data;
  std::vector<Call> calls = data.calls();
  std::vector<uint64_t> expected(calls.size());  // after each call, where all have been made before
  std::vector<int64_t> statuses(calls.size()), tape{THREADS};
  for (int pass = 0; pass < 2; pass++) {
    data.begin();
    for (size_t i = 0; i < calls.size(); i++) {
      calls[i].words[calls[i].threads] = 1;
      statuses[i] = calls[i].function(calls[i].words.data());
      expected[i] = data.outputs();
    }
  }
  for (size_t i = 0; i < calls.size(); i++) {
    std::vector<int64_t>& words = calls[i].words;
    words[calls[i].threads] = THREADS;
    tape.insert(tape.end(), {word(calls[i].function), statuses[i], int64_t(words.size())});
    tape.insert(tape.end(), words.begin(), words.end());
  }
  for (int round = 0; round < (count > 1 ? 1 : ROUNDS); round++) {
    data.begin();
    for (size_t i = 0; i < calls.size(); i++) {
      calls[i].function(calls[i].words.data());
      if (round == 0 && data.outputs() != expected[i]) return fail("%s: other bits", calls[i].name);
    }
    if (data.outputs() != expected.back()) return fail("threads: other bits in a later round");
    data.begin();
    const int64_t run[] = {word(tape.data()), int64_t(tape.size())};
    const int64_t wrong = mistralrs_tape_run_words(run);
    if (wrong >= 0) return fail("%s: another status on a tape", calls[wrong].name);
    if (data.outputs() != expected.back()) return fail("a team: other bits");
  }
  return count > 1 && !data.write(arguments[1]);
}
