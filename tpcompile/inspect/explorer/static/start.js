Explorer.start();
