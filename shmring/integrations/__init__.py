"""Other people's servers, with shmring inside. Each is imported by its server, and imports nothing until it is switched on."""
