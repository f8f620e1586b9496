import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;

/** Counts the inputs of each session: one store in memory with its changelog, one event for each input, one thread. */
public final class Counting {
    private static final String STORE = "counts";
    private static final ObjectMapper JSON = new ObjectMapper();

    /** Arguments: bootstrap servers, application id, inputs topic, events topic, a folder of its own. */
    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        properties.put(StreamsConfig.APPLICATION_ID_CONFIG, arguments[1]);
        properties.put(StreamsConfig.STATE_DIR_CONFIG, arguments[4]);
        properties.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        properties.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 1);
        properties.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        properties.put("auto.offset.reset", "earliest");

        Topology topology = new Topology();
        topology.addSource("inputs", Serdes.String().deserializer(), Serdes.ByteArray().deserializer(), arguments[2]);
        topology.addProcessor("count", Count::new, "inputs");
        topology.addStateStore(
            Stores.keyValueStoreBuilder(Stores.inMemoryKeyValueStore(STORE), Serdes.String(), Serdes.Long()), "count");
        topology.addSink("events", arguments[3], Serdes.String().serializer(), Serdes.ByteArray().serializer(), "count");

        KafkaStreams streams = new KafkaStreams(topology, properties);
        CountDownLatch ended = new CountDownLatch(1);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            streams.close();
            ended.countDown();
        }));
        streams.start();
        ended.await();
    }

    private static final class Count implements Processor<String, byte[], String, byte[]> {
        private ProcessorContext<String, byte[]> context;
        private KeyValueStore<String, Long> counts;

        @Override
        public void init(ProcessorContext<String, byte[]> given) {
            context = given;
            counts = given.getStateStore(STORE);
        }

        @Override
        public void process(Record<String, byte[]> input) {
            try {
                JsonNode command = JSON.readTree(input.value());
                String session = command.get("session").asText();
                Long before = counts.get(session);
                long count = before == null ? 1 : before + 1;
                counts.put(session, count);
                ObjectNode event = JSON.createObjectNode();
                event.put("session", session);
                event.put("count", count);
                event.put("number", command.get("number").asLong());
                context.forward(input.withValue(JSON.writeValueAsBytes(event)));
            } catch (java.io.IOException error) {
                throw new IllegalStateException(error);
            }
        }
    }
}
